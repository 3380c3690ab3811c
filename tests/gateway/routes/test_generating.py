"""Whatever goes wrong on a generating endpoint is reported in its own dialect's error format."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import Script, breaking, failing, make_gateway, play

from pagoda_gateway.api.error_body import OPENAI_ERRORS
from pagoda_gateway.dialects.completions import COMPLETIONS
from pagoda_gateway.generation import running
from pagoda_gateway.generation.run import Run
from pagoda_gateway.routes import generating
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import RequestRecord

PATH = "/other"


def other_error(error: PagodaError, request_id: str) -> dict[str, Any]:
    return {"oh": error.code.value}


OTHER_ERRORS = dataclasses.replace(OPENAI_ERRORS, status=lambda error: 418, body=other_error)


def bug(record: object) -> list[Any]:
    return [RuntimeError("bug")]


def one_token_and_a_failure(record: Any) -> Any:
    return breaking(72)(record)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "said"),
    [
        (failing(), {}, "overloaded"),
        (failing(), {"prompt": 1.5}, "invalid_argument"),
        (failing(), {"n": 99}, "invalid_argument"),
        (bug, {}, "internal_error"),
        (one_token_and_a_failure, {}, "stream_interrupted"),
    ],
)
async def test_a_failure_has_its_dialects_shape(
    tmp_path: Path, script: Script, fields: dict[str, Any], said: str, stream: bool
) -> None:
    other = dataclasses.replace(COMPLETIONS, name="other", path=PATH, error=OTHER_ERRORS)
    gateway = make_gateway(tmp_path, script)
    gateway.error_shapes[PATH] = other.error
    gateway.app.include_router(generating.router(gateway.context, gateway.tickets, [other]))
    response = await gateway.client.post(PATH, json={"prompt": "hello", "stream": stream} | fields)
    last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last) == {"oh": said}
    assert response.status_code == (200 if said == "stream_interrupted" and stream else 418)
    elsewhere = await gateway.client.post("/tokenize", json={})
    assert set(elsewhere.json()) == {"error"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "outcome"), [(play([72]), "finished"), (breaking(72), "failed")])
async def test_how_a_run_ended_is_logged_without_a_word_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: Script, outcome: str, stream: bool
) -> None:
    gateway = make_gateway(tmp_path, script)
    with caplog.at_level("DEBUG", running.__name__):
        await gateway.client.post("/v1/completions", json={"prompt": "hello", "stream": stream})
    (line,) = [record.getMessage() for record in caplog.records if record.name == running.__name__]
    assert line.startswith(f"cmpl-{gateway.engine.record.request_id} for ")
    assert f": {outcome}, " in line
    assert "hello" not in line


def stalls(record: RequestRecord) -> list[Any]:
    """One token, and nothing after it."""
    return [play([72, 73])(record)[0], asyncio.Event()]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_longer_than_its_client_said_ends_in_words(tmp_path: Path, stream: bool) -> None:
    gateway = make_gateway(tmp_path, stalls)
    body = {"prompt": "hello", "stream": stream}
    answer = await gateway.client.post("/v1/completions", json=body, headers={"Request-Timeout-Ms": "200"})
    assert answer.status_code == (200 if stream else 504)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-1] if stream else answer.text)["error"]
    assert error["code"] == "deadline_exceeded"
    assert stream or "retry-after" not in answer.headers
    assert gateway.engine.generations[0].closed.is_set()
    assert gateway.engine.record.queue_timeout_s == 0.2


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_run_held_is_freed_when_it_is_over(tmp_path: Path, stream: bool) -> None:
    """Answers may be large, and reference cycles are collected rarely."""
    gateway = make_gateway(tmp_path)
    gc.collect()
    others = runs()
    gc.disable()
    try:
        answer = await gateway.client.post("/v1/completions", json={"prompt": "hello", "stream": stream})
        assert answer.status_code == 200
        assert runs() <= others
    finally:
        gc.enable()


def runs() -> set[int]:
    return {id(each) for each in gc.get_objects() if type(each) is Run}


@pytest.mark.parametrize("said", [["0"], ["1.5"], ["-1"], ["86400001"], ["x"], [""], ["1", "2"], ["\u0661"]])
async def test_a_time_that_is_none_is_refused_by_its_header(tmp_path: Path, said: list[str]) -> None:
    gateway = make_gateway(tmp_path)
    headers = [("Request-Timeout-Ms", each.encode()) for each in said]
    answer = await gateway.client.post("/v1/completions", json={"prompt": "hello"}, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "Request-Timeout-Ms"
