"""Whatever the engine core sends and however it is split, a choice ends once and adds up to the whole answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import few
from tests.gateway.fakes_engine import MODEL, FakeGeneration, Gateway, make_gateway, play
from tests.gateway.routes.test_completions import PATH as COMPLETIONS

from pagoda_gateway.api.encoding import VALUES_PER_SLICE, encoded_columns, encoded_list, slices
from pagoda_proto.records import RequestRecord

CHAT = "/v1/chat/completions"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "hello", "echo": True},
}


class LateGeneration(FakeGeneration):
    """An abort takes effect late: deltas in flight still arrive."""

    async def abort(self, choices: Any = ()) -> None:
        pass


def late(gateway: Gateway, *texts: str, batch: int = 1) -> None:
    scripted = play(*(gateway.ids(text) for text in texts), batch=batch)

    async def submit(record: RequestRecord) -> FakeGeneration:
        generation = LateGeneration(record, scripted(record))
        gateway.engine.generations.append(generation)
        return generation

    gateway.engine.submit = submit  # type: ignore[method-assign]


async def both(gateway: Gateway, path: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the chunks of a stream."""
    whole = await gateway.client.post(path, json=ASK[path] | fields)
    assert whole.status_code == 200, whole.text
    stream = await gateway.client.post(path, json=ASK[path] | fields | {"stream": True})
    lines = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return whole.json(), [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@settings(max_examples=few(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(alphabet="ab<é🙂", max_size=10), min_size=2, max_size=2),
    batch=st.integers(1, 5),
    stop=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=3), max_size=2),
    extras=st.fixed_dictionaries({}, optional={"return_token_ids": st.just(True), "logprobs": st.just(True)}),
)
def test_every_choice_ends_once(
    tmp_path: Path, path: str, texts: list[str], batch: int, stop: list[str], extras: dict[str, Any]
) -> None:
    if path == COMPLETIONS and "logprobs" in extras:
        extras = extras | {"logprobs": 1}

    async def run() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        gateway = make_gateway(tmp_path)
        late(gateway, *texts, batch=batch)
        return await both(gateway, path, n=2, stop=stop, stream_options=None, **extras)

    whole, chunks = asyncio.run(run())
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        endings = [c["finish_reason"] for c in mine]
        assert endings == [None] * (len(endings) - 1) + [choice["finish_reason"]]
        shown = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in mine)
        assert shown == (choice["text"] if "text" in choice else choice["message"]["content"])
        if "return_token_ids" in extras:
            assert [i for c in mine for i in c.get("token_ids", ())] == choice["token_ids"]
        if "logprobs" in extras:
            for name, values in choice["logprobs"].items():
                told = [value for c in mine if c["logprobs"] for value in c["logprobs"][name] or ()]
                assert told == (values or [])


async def test_large_arrays_are_made_in_slices_that_let_others_run() -> None:
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    counting = asyncio.create_task(count())
    raw = await encoded_list(range(3 * VALUES_PER_SLICE), 1)
    columns = await encoded_columns(((i, str(i)) for i in range(3 * VALUES_PER_SLICE)), ("a", "b"), 2)
    counting.cancel()
    assert json.loads(bytes(raw)) == list(range(3 * VALUES_PER_SLICE))
    assert json.loads(bytes(columns["b"]))[-1] == str(3 * VALUES_PER_SLICE - 1)
    assert rounds >= 6


@given(num=st.integers(0, 3 * VALUES_PER_SLICE), each=st.integers(1, 2 * VALUES_PER_SLICE))
def test_slices_are_bounded_and_complete(num: int, each: int) -> None:
    parts = list(slices(range(num), each))
    assert [item for part in parts for item in part] == list(range(num))
    assert all(len(part) * each <= max(VALUES_PER_SLICE, each) for part in parts)


async def test_nothing_is_an_empty_array() -> None:
    assert bytes(await encoded_list([], 1)) == b"[]"
    assert {name: bytes(raw) for name, raw in (await encoded_columns([], ("a", "b"), 1)).items()} == {
        "a": b"[]",
        "b": b"[]",
    }


async def test_a_hidden_output_ends_once_too(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)

    gateway.engine.script = play(gateway.ids("ab"))
    whole, chunks = await both(gateway, COMPLETIONS, max_tokens=0, return_token_ids=True)
    assert whole["choices"][0]["text"] == "hello"
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "length"
