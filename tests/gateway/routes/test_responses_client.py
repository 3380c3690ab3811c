"""OpenAI's own client reads the answers of /v1/responses, over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.gateway.fakes_engine import MODEL, Gateway
from tests.gateway.fakes_engine import saying_all as saying
from tests.gateway.routes.test_messages_client import serving
from tests.gateway.routes.test_responses import CALL, TOOL

from pagoda_proto.records import FinishReason


@asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(gateway) as running:
        url = f"http://127.0.0.1:{running.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=60) as client:
            yield client


async def test_a_conversation(tmp_path: Path) -> None:
    async with client_of(saying(tmp_path, "hello world")) as client:
        first = await client.responses.create(model=MODEL, input="hi", instructions="be brief")
        second = await client.responses.create(model=MODEL, input="again", previous_response_id=first.id)
        assert (first.output_text, second.output_text) == ("hello world", "hello world")
        assert await client.responses.retrieve(second.id) == second
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [getattr(item, "role", "") for item in items] == ["user", "assistant", "user"]
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)


async def test_a_stream_of_text(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello world")
    async with client_of(gateway) as client, client.responses.stream(model=MODEL, input="hi") as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == "hello world"
    assert final.usage is not None
    assert final.usage.output_tokens > 0


async def test_calls_go_back_with_their_results(tmp_path: Path) -> None:
    gateway = saying(tmp_path, CALL)
    tools: Any = [TOOL]
    async with client_of(gateway) as client:
        async with client.responses.stream(model=MODEL, input="add", tools=tools) as stream:
            answer = await stream.get_final_response()
        (call,) = answer.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        said: Any = [{"role": "user", "content": "add"}, call.model_dump(exclude_none=True), result]
        assert (await client.responses.create(model=MODEL, input=said, tools=tools)).status == "completed"


async def test_a_stream_of_one_in_the_background(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "hello world")
    asked: Any = {"model": MODEL, "input": "hi", "background": True}
    async with client_of(gateway) as client, client.responses.stream(**asked) as stream:
        assert [event.type async for event in stream][:2] == ["response.created", "response.queued"]
        assert (await stream.get_final_response()).output_text == "hello world"


async def test_in_the_background(tmp_path: Path) -> None:
    async with client_of(saying(tmp_path, "hello world", reason=FinishReason.LENGTH)) as client:
        events = [
            event
            async for event in await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        ]
        name: Any = events[-1]
        assert events[-1].type == "response.incomplete"
        rest = await client.responses.retrieve(name.response.id, stream=True, starting_after=3)
        assert [event async for event in rest] == events[4:]
        assert (await client.responses.cancel(name.response.id)).status == "incomplete"
