"""OpenAI's official client has files answered by the real stack, and a gateway that dies loses nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch
from tests.e2e.stack import Stack, kill, running_stack

pytestmark = pytest.mark.e2e
MODEL, URL = "demo", "/v1/chat/completions"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    place = tmp_path_factory.mktemp("stack")
    options = ["--served-model-name", MODEL, "--max-batch-requests", "4", "--store", f"sqlite://{place}/store.db"]
    with running_stack(place, *options) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.client(timeout=240) as client:
        yield client


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    whole = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": whole}


def submitted(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Batch:
    content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"number": str(len(lines))}
    )


def seen(client: openai.OpenAI, batch: Batch, *, until: str = "") -> Batch:
    """Once it has ended, or has this status; whatever happens to gateways meanwhile."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            batch = client.batches.retrieve(batch.id)
        except (openai.APIConnectionError, openai.InternalServerError):
            pass
        else:
            if batch.status in ("completed", "failed", "expired", "cancelled", until):
                return batch
        time.sleep(0.05)
    raise TimeoutError(batch)


def rows(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = client.files.content(file_id).text
    found = {row["custom_id"]: row for row in map(json.loads, content.splitlines())}
    assert len(found) == content.count("\n")
    return found


def test_a_file_of_requests_becomes_a_file_of_answers(client: openai.OpenAI) -> None:
    batch = submitted(client, [line("sum"), line("other", n=2), line("bad", top_k="none")])
    ended = seen(client, batch)
    assert (ended.status, ended.metadata, ended.model) == ("completed", {"number": "3"}, MODEL)
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    answers = rows(client, ended.output_file_id)
    live = client.chat.completions.create(**line("sum")["body"])
    told = answers["sum"]["response"]["body"]["choices"][0]["message"]["content"]
    assert told == live.choices[0].message.content
    assert len(answers["other"]["response"]["body"]["choices"]) == 2
    assert rows(client, ended.error_file_id)["bad"]["response"]["body"]["error"]["param"] == "top_k"
    assert batch.id in [each.id for each in client.batches.list(limit=5)]
    for file_id in (ended.output_file_id, ended.error_file_id):
        assert file_id is not None
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)


def test_a_gateway_that_dies_is_gone_on_from(stack: Stack, client: openai.OpenAI) -> None:
    names = [f"line {i}" for i in range(40)]
    lines = [line(name, max_tokens=256, ignore_eos=True, seed=i) for i, name in enumerate(names)]
    batch = submitted(client, lines)
    for _ in range(2):
        assert seen(client, batch, until="in_progress").status == "in_progress"
        kill(stack.children("gateway")[0].pid)
        stack.wait_until(stack.ready)
    ended = seen(client, batch)
    assert ended.status == "completed"
    answers = rows(client, ended.output_file_id)
    assert sorted(answers) == sorted(names)
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in answers.values()} == {256}


def test_a_batch_that_is_cancelled_keeps_what_is_done(client: openai.OpenAI) -> None:
    names = [f"line {i}" for i in range(400)]
    batch = submitted(client, [line(name, max_tokens=64, ignore_eos=True) for name in names])
    assert seen(client, batch, until="in_progress").status == "in_progress"
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = seen(client, batch)
    assert ended.status == "cancelled"
    done = {} if ended.output_file_id is None else rows(client, ended.output_file_id)
    left = rows(client, ended.error_file_id)
    assert sorted([*done, *left]) == sorted(names)
    assert {row["error"]["code"] for row in left.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)
