"""All text of a request is measured; it is refused early where possible, and otherwise tokenised in bounded pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import Gateway, chat_record, make_gateway

from pagoda_gateway.api.schemas import ChatRequest, CompletionRequest
from pagoda_gateway.dialects.completions import completion_records
from pagoda_gateway.generation import prompts
from pagoda_gateway.http.text_pool import INLINE_SIZE
from pagoda_gateway.routes.body import parse_body
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError
from pagoda_proto.records import Load

LONG = "hello world " * 300_000  # 3.6 MB
MESSAGES = [{"role": "user", "content": "hello"}]


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]


class Watched:
    """A gateway whose calls to tokenise are recorded by length, and whose renderings are counted."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **load: Any) -> None:
        self.gateway: Gateway = make_gateway(root)
        if load:
            self.gateway.engine.load = Load(engine_id="x", **load)
        self.encoded: list[int] = []
        self.rendered = 0
        cls = type(self.gateway.text)
        encode, render = cls.encode, cls.render_marked

        def watched_encode(text: Any, value: str, *args: Any, **kwargs: Any) -> list[int]:
            self.encoded.append(len(value))
            return encode(text, value, *args, **kwargs)

        def watched_render(*args: Any, **kwargs: Any) -> str:
            self.rendered += 1
            return render(*args, **kwargs)

        monkeypatch.setattr(cls, "encode", watched_encode)
        monkeypatch.setattr(cls, "render_marked", watched_render)


BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": LONG}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    {"messages": MESSAGES, "tools": [tool(description=LONG)]},
    {"messages": MESSAGES, "tools": [tool(parameters={"properties": {"a": {"description": LONG}}})]},
    {"messages": MESSAGES, "tools": [tool(parameters={LONG: 1})]},
    {"messages": calling(json.dumps({"a": LONG})), "tools": [tool()]},
    {"messages": MESSAGES, "chat_template_kwargs": {"mood": LONG}},
    {"messages": [{"role": "assistant", "content": "x", "reasoning_content": LONG}]},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_what_cannot_fit_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    with pytest.raises(PagodaError) as caught:
        await chat_record(watched.gateway.context, parse_body(ChatRequest, body | {"max_tokens": 7}))
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "messages")
    for number in ("256", "7 in the completion"):  # the limit, and the requested number
        assert number in caught.value.message
    assert (watched.encoded, watched.rendered) == ([], 0)


@pytest.mark.parametrize("body", [*BODIES[:6], {"prompt": LONG}], ids=range(7))
async def test_what_may_fit_is_counted_in_slices_until_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """If tokens may have any length, the number of tokens cannot be bounded in advance."""
    watched = Watched(tmp_path, monkeypatch)
    object.__setattr__(watched.gateway.text, "longest_token_bytes", 0)
    ctx = watched.gateway.context
    with pytest.raises(PagodaError) as caught:
        if "prompt" in body:
            await completion_records(ctx, parse_body(CompletionRequest, body))
        else:
            await chat_record(ctx, parse_body(ChatRequest, body))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert watched.encoded == [prompts.SLICE_CHARS]


async def test_a_long_prompt_that_fits_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word is one token here, so the text is longer than what is tokenised unmeasured, but fits the context."""
    watched = Watched(tmp_path, monkeypatch, max_model_len=100_000)
    text = " hello world" * 45_000
    record = await chat_record(
        watched.gateway.context, parse_body(ChatRequest, {"messages": [{"role": "user", "content": text}]})
    )
    assert record.prompt_token_ids == watched.gateway.text.encode_chat([{"role": "user", "content": text}])
    assert max(watched.encoded) < len(text) + 100
    watched.encoded.clear()
    many = parse_body(CompletionRequest, {"prompt": ["hello " * 100] * 100})
    await completion_records(watched.gateway.context, many)
    assert len(watched.encoded) == 100


@pytest.mark.parametrize(
    ("keep", "opening", "kept"),
    [
        (None, [0], [0, 1, 2, 3]),
        (4, [0], [0, 1, 2, 3]),
        (3, [0], [0, 2, 3]),
        (3, [9], [1, 2, 3]),
        (3, [], [1, 2, 3]),
        (1, [0], [3]),
    ],
)
def test_the_last_tokens_are_kept_behind_what_opens_a_text(
    keep: int | None, opening: list[int], kept: list[int]
) -> None:
    assert prompts.last([0, 1, 2, 3], keep, opening) == kept


def test_short_texts_are_read_together_and_long_ones_alone() -> None:
    texts = ["a" * 10, "b" * (prompts.SLICE_CHARS - 10), "c", "d" * (2 * prompts.SLICE_CHARS), "e"]
    assert [[text[0] for text in batch] for batch in prompts._batches(texts)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(prompts._batches([])) == []


def test_the_size_of_a_request_is_looked_at_no_further_than_it_matters() -> None:
    huge = parse_body(ChatRequest, {"messages": MESSAGES, "tools": [tool(parameters={"a": [{}] * 130_000})]})
    assert prompts.work_size([huge.messages, huge.tools]) > prompts.LARGE_SIZE
    small = parse_body(ChatRequest, {"messages": MESSAGES})
    assert prompts.work_size([small.messages, small.tools]) < INLINE_SIZE


async def test_tokenizing_has_a_bound_of_its_own(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, max_tokenize_chars=1000)
    for length, status in ((1000, 200), (1001, 400), (10**6, 400)):
        response = await gateway.client.post("/tokenize", json={"prompt": "a" * length})
        assert response.status_code == status
    assert response.json()["error"]["param"] == "prompt"
    assert "at most 1000 characters" in response.json()["error"]["message"]
    messages = [{"role": "user", "content": "a" * 1000}]
    assert (await gateway.client.post("/tokenize", json={"messages": messages})).status_code == 400


PRODUCTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [[1] * 200] * 4, "prompt_logprobs": 19}, "prompt_logprobs"),
    ({"prompt": [[1] * 200] * 4, "echo": True, "logprobs": 19}, "logprobs"),
    ({"prompt": ["hello " * 100] * 40, "prompt_logprobs": 4}, "prompt_logprobs"),
    ({"prompt": [[1]] * 4, "n": 16, "max_tokens": 200, "logprobs": 4}, "logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), PRODUCTS)
async def test_products_of_limits_are_limited(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    gateway = make_gateway(tmp_path, max_prompt_logprob_values=15_999, max_logprob_values=60_000)
    response = await gateway.client.post("/v1/completions", json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert "values; at most" in error["message"]
    assert gateway.engine.generations == []


async def test_products_are_refused_before_anything_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monkeypatch, max_model_len=2048)
    body = parse_body(CompletionRequest, {"prompt": [[1] * 2000] * 32, "prompt_logprobs": 20})
    with pytest.raises(
        InvalidParams, match=r"32 prompts of 64000 tokens together x \(1 \+ prompt_logprobs 20\) are 1344000"
    ):
        await completion_records(watched.gateway.context, body)
    assert watched.encoded == []


async def test_a_stream_may_be_longer_than_a_whole_answer(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, max_logprob_values=100)
    fields = {"messages": MESSAGES, "logprobs": True, "max_tokens": 200}
    assert (await gateway.client.post("/v1/chat/completions", json=fields)).status_code == 400
    assert (await gateway.client.post("/v1/chat/completions", json=fields | {"stream": True})).status_code == 200
