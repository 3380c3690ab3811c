"""The Messages API with Anthropic's own client: over a socket, through the whole app, to a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import Message, MessageParam, ToolParam
from tests.gateway.fakes_engine import MODEL, Gateway, breaking, failing, make_gateway, play
from tests.gateway.fakes_engine import saying_all as saying
from tests.gateway.http_fakes import Running, running_http, talk
from tests.gateway.model_dir import CHAT_TEMPLATE, write_model_dir

from pagoda_gateway.api.answer_schemas import MessagesErrorAnswer
from pagoda_gateway.app import create_app
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason

TOOL: ToolParam = {"name": "add", "description": "sums", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": ["é"]}}\n</tool_call>'
HELLO: list[MessageParam] = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": HELLO}


def kind_of(caught: pytest.ExceptionInfo[anthropic.APIStatusError]) -> str:
    """The error's type; checks that the id in its body is that of the header."""
    body: Any = caught.value.body
    assert body["request_id"] == caught.value.request_id != ""
    return str(body["error"]["type"])


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[Running]:
    gateway.background.start()
    try:
        async with running_http(create_app(gateway.served()), gateway.context.config) as running:
            yield running
    finally:
        await gateway.background.aclose()


@asynccontextmanager
async def client_of(gateway: Gateway, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with serving(gateway) as running:
        options = {"api_key": "x", "max_retries": 0, "timeout": 60} | options
        async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", **options) as client:
            yield client


async def test_a_message(tmp_path: Path) -> None:
    async with client_of(saying(tmp_path, "hello world")) as client:
        answer = await client.messages.with_raw_response.create(**ASK)
        message: Any = await answer.parse()  # type: ignore[misc]
    assert isinstance(message, Message)
    assert [block.text for block in message.content if block.type == "text"] == ["hello world"]
    assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("end_turn", 2)
    assert answer.headers["request-id"] == answer.headers["x-request-id"] != ""
    assert answer.request_id == answer.headers["request-id"]


async def test_a_stream_with_tools_and_the_conversation_it_leads_to(tmp_path: Path) -> None:
    gateway = saying(tmp_path, f"Let me see.\n{CALL}{CALL}")
    gateway.engine.load = msgspec.structs.replace(gateway.engine.load, max_model_len=2048)
    async with client_of(gateway) as client:
        async with client.messages.stream(**ASK, tools=[TOOL], tool_choice={"type": "auto"}) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        text, *uses = message.content
        assert (text.type, message.stop_reason) == ("text", "tool_use")
        assert [use.input for use in uses if use.type == "tool_use"] == [{"a": 1, "b": ["é"]}] * 2
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "3"} for use in uses]  # type: ignore[union-attr]
        messages: Any = [
            *HELLO,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]
        await client.messages.create(**ASK | {"messages": messages}, tools=[TOOL])
    seen = gateway.text.decode(gateway.engine.generations[-1].record.prompt_token_ids, skip_special_tokens=False)
    assert seen.count('{"name": "add", "arguments": {"a": 1, "b": ["é"]}}') == 2
    assert seen.count("<|im_start|>tool\n3") == 2


async def test_a_stream_with_thoughts(tmp_path: Path) -> None:
    """Inputs of tool calls are streamed as they are written."""
    template = CHAT_TEMPLATE + "{# <think> </think> #}"
    model = write_model_dir(tmp_path / "model", tokenizer_config={"chat_template": template})
    gateway = Gateway(model, play([]))
    gateway.engine.script = play(gateway.ids(f"<think>\nHm.\n</think>\n\nSo.\n{CALL}"), reason=FinishReason.STOP)
    gateway.engine.load = msgspec.structs.replace(gateway.engine.load, max_model_len=2048)
    asked = ASK | {"max_tokens": 2000, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    async with client_of(gateway) as client, client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        message: Any = await stream.get_final_message()
    thought, text, use = message.content
    assert (thought.thinking, text.text, use.input) == ("Hm.", "So.", {"a": 1, "b": ["é"]})
    assert kinds.count("thinking") > 1
    assert kinds.count("input_json") > 4


async def test_a_count(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    async with client_of(gateway) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system="be brief", tools=[TOOL])
        await client.messages.create(**ASK, system="be brief", tools=[TOOL])
    assert counted.input_tokens == len(gateway.engine.record.prompt_token_ids)


@pytest.mark.parametrize("options", [{"api_key": "x"}, {"api_key": None, "auth_token": "x"}])
async def test_a_key_is_taken_either_way(tmp_path: Path, options: dict[str, Any]) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-2026-01-01"}
    async with client_of(saying(tmp_path, "x"), default_headers=headers, **options) as client:
        assert (await client.messages.create(**ASK)).stop_reason == "end_turn"


async def test_errors_are_the_clients_own(tmp_path: Path) -> None:
    async with client_of(saying(tmp_path, "x", max_body_bytes=2000)) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**ASK | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="thinking") as bad:
            await client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
        with pytest.raises(anthropic.APIStatusError, match="2000 bytes") as large:
            await client.messages.create(**ASK, system="x" * 3000)
        with pytest.raises(anthropic.NotFoundError) as batches:
            await client.messages.batches.list()
    assert (kind_of(missing), kind_of(bad)) == ("not_found_error", "invalid_request_error")
    assert (large.value.status_code, kind_of(large)) == (413, "request_too_large")
    assert kind_of(batches) == "not_found_error"


async def test_an_overloaded_server_says_when_to_come_again(tmp_path: Path) -> None:
    async with client_of(make_gateway(tmp_path, failing(ErrorCode.OVERLOADED, retry_after_s=2.5))) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**ASK)
    assert (caught.value.status_code, kind_of(caught)) == (529, "overloaded_error")
    assert caught.value.response.headers["retry-after"] == "3"


async def test_a_stream_that_breaks_raises(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    gateway.engine.script = breaking(*gateway.ids("ab"))
    text = ""
    async with client_of(gateway) as client:
        with pytest.raises(anthropic.APIStatusError, match="worker lost") as caught:
            async with client.messages.stream(**ASK) as stream:
                async for piece in stream.text_stream:
                    text += piece
    assert (text, kind_of(caught)) == ("ab", "api_error")


async def test_a_client_that_leaves_ends_its_generation(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    scripted = play(gateway.ids("abc"))
    gateway.engine.script = lambda record: [*scripted(record)[:2], asyncio.Event()]
    async with client_of(gateway) as client, asyncio.timeout(60):
        async with client.messages.stream(**ASK) as stream:
            async for _piece in stream.text_stream:
                break
        await gateway.engine.generations[0].closed.wait()


DEEP = b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}"
MANY = b'{"messages": [' + b"1," * 2**17 + b"1]}"
FORM = "content-type: text/plain"
TYPE = "content-type: application/json"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("lines", "body", "status", "kind", "said"),
    [
        ([TYPE], b"{", 400, "invalid_request_error", "not valid JSON"),
        ([TYPE], b'{"a": 1, "a": 2}', 400, "invalid_request_error", "twice"),
        ([TYPE], DEEP, 400, "invalid_request_error", "deeper"),
        ([TYPE], MANY, 400, "invalid_request_error", "values"),
        ([FORM], b"{}", 415, "invalid_request_error", "application/json"),
        ([TYPE, "content-encoding: gzip"], b"{}", 415, "invalid_request_error", "compressed"),
        ([TYPE, *(f"x-{i}: 1" for i in range(99))], b"{}", 431, "invalid_request_error", "headers"),
        ([TYPE], b" " * 1_000_001, 413, "request_too_large", "1000000 bytes"),
    ],
)
async def test_what_is_refused_unread_is_told_in_the_same_shape(
    tmp_path: Path, path: str, lines: list[str], body: bytes, status: int, kind: str, said: str
) -> None:
    gateway = saying(tmp_path, "x", max_body_bytes=1_000_000)
    head = [f"POST {path}?beta=true HTTP/1.1", "host: h", "connection: close", f"content-length: {len(body)}", *lines]
    async with serving(gateway) as running:
        got, headers, answer = await talk(running.port, "\r\n".join([*head, "", ""]).encode() + body)
    message = MessagesErrorAnswer.model_validate_json(answer)
    assert (got, message.error.type, message.request_id) == (status, kind, headers["request-id"])
    assert said in message.error.message
    assert gateway.engine.generations == []


async def test_wrong_methods_and_slow_bodies(tmp_path: Path) -> None:
    async with serving(saying(tmp_path, "x", body_timeout_s=0.2)) as running:
        for data, status in (
            (b"GET /v1/messages HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n", 405),
            (b"POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n", 408),
        ):
            got, _, answer = await talk(running.port, data)
            assert got == status
            assert MessagesErrorAnswer.model_validate_json(answer).error.type == "invalid_request_error"
