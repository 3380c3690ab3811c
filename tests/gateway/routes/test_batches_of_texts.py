"""Batches of embeddings: lines are answered like requests, but after all requests that a client waits for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fakes_engine import MODEL, Gateway, make_gateway, play, reads
from tests.gateway.model_dir import write_reader_dir

from pagoda_gateway.routes.batch_service import BatchService
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import in_background

EMBEDDINGS, CHAT = "/v1/embeddings", "/v1/chat/completions"
X, Y = [1.0, 0.5, -2.0], [0.25, 0.0, 4.0]


def line(**body: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": EMBEDDINGS, "body": body}).encode()


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[BatchService]:
    try:
        yield BatchService(gateway.context)
        assert gateway.context.memory.held_bytes == 0
    finally:
        await gateway.context.store.aclose()
        gateway.context.pool.close()


async def test_a_line_is_answered_as_a_request_is_and_waits_behind_all(tmp_path: Path) -> None:
    gateway = Gateway(write_reader_dir(tmp_path), reads(X, Y))
    body = {"model": MODEL, "input": ["a b", "a"]}
    async with serving(gateway) as service:
        found = json.loads(await service.answer(EMBEDDINGS, line(**body), ""))
        live = (await gateway.client.post(EMBEDDINGS, json=body)).json()
    for name in ("object", "model", "data", "usage"):
        assert found[name] == live[name]
    first, _, waited, _ = gateway.engine.generations
    assert (first.record.priority, waited.record.priority) == (in_background(0), 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
    ],
)
async def test_what_a_request_may_not_say_a_line_may_not(body: dict[str, Any], param: str, tmp_path: Path) -> None:
    gateway = Gateway(write_reader_dir(tmp_path), reads(X))
    async with serving(gateway) as service:
        with pytest.raises(PagodaError) as caught:
            await service.answer(EMBEDDINGS, line(**body), "")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, param)
    assert not gateway.engine.generations


async def test_a_line_for_a_model_of_the_other_kind_is_refused_as_a_request_is(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    generating = make_gateway(tmp_path / "g", play([5]))
    reading = Gateway(write_reader_dir(tmp_path / "r"), reads(X))
    for gateway, path, body in ((generating, EMBEDDINGS, {"input": "a"}), (reading, CHAT, chat)):
        live = (await gateway.client.post(path, json=body)).json()["error"]
        async with serving(gateway) as service:
            with pytest.raises(PagodaError) as caught:
                await service.answer(path, line(**body), "")
        assert (caught.value.param, caught.value.message) == (live["param"], live["message"])
        assert not gateway.engine.generations


async def test_a_batch_of_texts_may_be_asked_for(tmp_path: Path) -> None:
    gateway = Gateway(write_reader_dir(tmp_path), reads(X))
    async with serving(gateway):
        files = {"file": ("l", line(input="a"))}
        client: httpx.AsyncClient = gateway.client
        file_id = (await client.post("/v1/files", files=files, data={"purpose": "batch"})).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": EMBEDDINGS, "completion_window": "24h"}
        answer = await client.post("/v1/batches", json=asked)
    assert (answer.status_code, answer.json()["endpoint"]) == (200, EMBEDDINGS)
