"""Wherever a stream breaks off and however its tokens are split next time, the rest follows its last id exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import few
from tests.fakes import make_delta
from tests.gateway.fakes_engine import MODEL, NUM_CACHED, Batch, Gateway, Script, logprobs_for
from tests.gateway.routes.test_tools import TOOLS, call, thinking_model

from pagoda_gateway.clients import NOBODY
from pagoda_gateway.dialects.chat import CHAT
from pagoda_gateway.dialects.completions import COMPLETIONS
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.dialects.logprobs import COLUMNS
from pagoda_gateway.dialects.messages import MESSAGES
from pagoda_gateway.dialects.responses import RESPONSES
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.positions import Marks, Position
from pagoda_gateway.generation.run import Run
from pagoda_gateway.generation.tape import Tape
from pagoda_proto.records import Begun, FinishReason, RequestRecord, Usage

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "stream": True}
HELLO = [{"role": "user", "content": "hello"}]
LOGPROBS = {"logprobs": True, "top_logprobs": 1}
USAGE = {"stream_options": {"include_usage": True}}
MIXED = "<think>\nhm 🙂 hm</think>so: héé " + call("add") + "\n" + call("sub", '{"a": 22}')
PROMPTS = ["hello", "the world"]
CASES: dict[str, tuple[Dialect[Any], dict[str, Any], list[str]]] = {
    "text": (CHAT, {"messages": HELLO, "n": 2} | LOGPROBS | USAGE, ["hello 🙂 world", "é日本"]),
    "stop": (CHAT, {"messages": HELLO, "stop": ["orl", "zz"]} | LOGPROBS, ["hello zworld and more"]),
    "calls": (CHAT, {"messages": HELLO, "tools": TOOLS} | USAGE, [MIXED]),
    "thoughts unseen": (CHAT, {"messages": HELLO, "tools": TOOLS, "include_reasoning": False} | LOGPROBS, [MIXED]),
    "ids": (CHAT, {"messages": HELLO, "return_token_ids": True}, ["hello 🙂"]),
    "completions": (
        COMPLETIONS,
        {"prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 1} | USAGE,
        ["hello 🙂 world", "é日本"],
    ),
    "completions' ids": (COMPLETIONS, {"prompt": PROMPTS, "return_token_ids": True, "stop": "wor"}, ["é hello world"]),
    "messages": (
        MESSAGES,
        {
            "messages": HELLO,
            "tools": [{"name": n, "input_schema": {"type": "object"}} for n in ("add", "sub")],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": 2000,
        },
        [MIXED],
    ),
    "responses": (
        RESPONSES,
        {"input": "hello", "top_logprobs": 1, "include": ["message.output_text.logprobs"], "max_tokens": None},
        ["so: héé 🙂"],
    ),
    "responses with calls": (
        RESPONSES,
        {
            "input": "hello", "max_tokens": None,
            "tools": [{"type": "function", "name": n, "parameters": {"type": "object"}} for n in ("add", "sub")],
        },
        [MIXED],
    ),
}  # fmt: skip
CUTS = st.lists(st.integers(1, 6), max_size=12)


def cut_script(said: Sequence[Sequence[int]], cuts: Sequence[int]) -> Script:
    """Choices take turns, in pieces of these sizes and then of one token; the last piece of each has its ending."""

    def script(record: RequestRecord) -> list[Batch]:
        n, sizes, batches = record.task.params.n, iter(cuts), list[Batch]()
        left = {i: (0, list(said[i % len(said)])) for i in range(n)}
        while left:
            for i, (at, tokens) in list(left.items()):
                size = next(sizes, 1)
                part, rest = tokens[:size], tokens[size:]
                delta = make_delta(
                    at, part, request_id=record.request_id, choice=i,
                    logprobs=logprobs_for(record, part, record.task.params.logprobs),
                    finish_reason=None if rest else FinishReason.STOP,
                )  # fmt: skip
                if not batches:
                    delta.result.begun = Begun(model_fingerprint="f", numerics_id="x", cached_prompt_tokens=NUM_CACHED)
                    prompt = record.prompt_token_ids[1:]
                    delta.result.prompt_logprobs = logprobs_for(record, prompt, record.task.params.prompt_logprobs)
                batches.append([delta])
                left[i] = (at + len(part), rest)
                if not rest:
                    del left[i]
        last = batches[-1]
        assert isinstance(last, list)
        last[-1].usage = Usage(prompt_tokens=len(record.prompt_token_ids), cached_prompt_tokens=NUM_CACHED)
        return batches

    return script


class Streams:
    """One job, streamed repeatedly."""

    def __init__(self, root: Path, dialect: Dialect[Any], fields: dict[str, Any], said: list[str]) -> None:
        self.dialect, self.said = dialect, said
        self.gateway: Gateway = thinking_model(root)
        body = dialect.body.model_validate({k: v for k, v in (ASK | fields).items() if v is not None})
        self.job: Job = asyncio.run(self._job(body))

    async def _job(self, body: Any) -> Job:
        return await self.dialect.job(self.gateway.context, body, NOBODY)

    def told(self, cuts: Sequence[int], known: Position | None = None) -> list[bytes]:
        """The job's events, each with its id."""
        return asyncio.run(self._told(cuts, known))

    async def _told(self, cuts: Sequence[int], known: Position | None) -> list[bytes]:
        self.gateway.engine.script = cut_script([self.gateway.ids(text) for text in self.said], cuts)
        tape = Tape(self.job.id)
        data = b""
        async with aclosing(Run(self.job, self.gateway.text, lambda usage, outcome: None)) as run:
            await run.start(self.gateway.engine, tape.recording)
            marks = Marks("stream_1", tape, sum(len(part.choices) for part in run.parts), known)
            async for piece in self.dialect.writer(self.gateway.context, run, marks).events():
                data += piece
        return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def id_of(event: bytes) -> Position | None:
    first = event.split(b"\n")[0]
    return Position.read(first[4:].decode()) if first.startswith(b"id: ") else None


STREAMED = {"content", "text", "reasoning", "reasoning_content", "arguments", "delta", "thinking", "partial_json"}
LISTED = {"content", "token_ids", "prompt_token_ids", "logprobs"} | set(COLUMNS)
Leaf = tuple[str, Any]


def leaves(value: Any, name: str = "", path: str = "") -> Iterator[Leaf]:
    """The values in an event, with their paths. Streamed text and lists are leaves."""
    if isinstance(value, dict):
        for inner, each in value.items():
            yield from leaves(each, inner, f"{path}.{inner}")
    elif isinstance(value, list) and name not in LISTED:
        for each in value:
            yield from leaves(each, name, f"{path}[]")
    elif value is not None:
        yield path, value


def streamed(leaf: Leaf) -> bool:
    name = leaf[0].rpartition(".")[2]
    return name in (LISTED if isinstance(leaf[1], list) else STREAMED)


def added_up(events: Sequence[bytes]) -> dict[str, Any]:
    """What a client assembles per choice: streamed text and lists are concatenated, values sent with them are
    collected, and everything else is kept as it came."""
    found: dict[str, Any] = {}
    for event in events:
        data = next(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
        told = {"done": True} if data == b"[DONE]" else json.loads(data)
        told.pop("sequence_number", None)
        told.get("response", {}).pop("completed_at", None)
        for choice in told.get("choices") or [None]:
            key = "besides" if choice is None else f"choice {choice['index']}"
            whole = found.setdefault(key, {"said": [], "repeated": set()})
            said = list(leaves(told if choice is None else choice))
            pieces = [leaf for leaf in said if streamed(leaf)]
            for path, piece in pieces:
                whole[path] = whole[path] + piece if path in whole else piece
            rest = [leaf for leaf in said if leaf not in pieces]
            if pieces and not any("finish_reason" in path for path, _ in rest):
                whole["repeated"] |= {leaf for leaf in rest if leaf[0] != ".index"}
            else:
                whole["said"].append(rest)
    return found


@pytest.fixture(scope="module", params=list(CASES))
def streams(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Streams:
    return Streams(tmp_path_factory.mktemp("model"), *CASES[request.param])


@settings(max_examples=few(8), deadline=None)
@given(first=CUTS, again=CUTS, at=st.integers(0, 400))
def test_a_stream_goes_on_behind_its_last_id(streams: Streams, first: list[int], again: list[int], at: int) -> None:
    undisturbed = streams.told(first)
    seen = undisturbed[: 1 + at % len(undisturbed)]
    last = next((found for event in reversed(seen) if (found := id_of(event)) is not None), None)
    assert last is not None
    rest = streams.told(again, last)
    assert added_up([event for event in seen if b"[DONE]" not in event] + rest) == added_up(undisturbed)
