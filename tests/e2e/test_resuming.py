"""A gateway is killed under streams of OpenAI's and Anthropic's clients, which do not notice: another gateway resumes
them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from bench.sides import free_port, is_ready
from tests.e2e.stack import Stack, running_stack
from tests.e2e.streams import MODEL, formed, plain
from tests.e2e.tiers import Tiers, tiers_apart
from tests.faults.variants import TALK, Answer, Client, Counted, answer, shorter, with_stop
from tests.gateway.store.redis_server import RedisServer, running_redis

from pagoda.client.httpx2_transport import AsyncResumingTransport

pytestmark = pytest.mark.e2e

# Texts, greedy and sampled, one with two choices; a schema, and a tool call.
LONG = 200  # tokens; faults are injected after the first few
REQUESTS = [shorter(one, LONG) for one in (plain(1), plain(4), formed(4), formed(5), TALK)]
MESSAGE: dict[str, Any] = {
    "model": MODEL, "max_tokens": LONG, "messages": [{"role": "user", "content": "Tell me a story."}],
    "extra_body": {"temperature": 0},
}  # fmt: skip
NUM_MESSAGES = 4


async def message(client: anthropic.AsyncAnthropic, flowing: Callable[[], None]) -> dict[str, Any]:
    """The whole message, however its events were split, without its id."""
    async with client.messages.stream(**MESSAGE) as stream:
        async for _ in stream.text_stream:
            flowing()
        return (await stream.get_final_message()).model_dump(exclude={"id"})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="module")
def stack(place: Path) -> Iterator[Stack]:
    options = ["--served-model-name", MODEL, "--store", f"sqlite://{place}/store.db"]
    with running_stack(place, *options) as running:
        yield running


@pytest.fixture(scope="module")
def tiers(place: Path) -> Iterator[Tiers]:
    with tiers_apart(place) as started:
        yield started


@pytest.fixture(scope="module")
def requests(stack: Stack) -> list[dict[str, Any]]:
    """REQUESTS, and one that ends with a stop string from the second half of its text."""
    with stack.client() as client:
        told = client.chat.completions.create(**REQUESTS[-1] | {"stream": False}).choices[0].message.content or ""
    return [*REQUESTS, shorter(with_stop(told), LONG)]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, requests: list[dict[str, Any]]) -> list[Answer]:
    async def all_of_them() -> list[Answer]:
        async with stack.async_client() as client:
            return await asyncio.gather(*(answer(client, request) for request in requests))

    return asyncio.run(all_of_them())


def start_gateway(stack: Stack, tiers: Tiers, name: str, store: str) -> str:
    port, engine = free_port(), stack.engine_sockets()[0]
    options = ["--engine", f"unix:{engine}", "--port", str(port), "--served-model-name", MODEL, "--store", store]
    tiers.start(name, "gateway", *options)
    return f"http://127.0.0.1:{port}"


@asynccontextmanager
async def gateways(stack: Stack, tiers: Tiers) -> AsyncIterator[tuple[list[str], RedisServer]]:
    """Two gateways that share a store."""
    async with running_redis() as redis:
        urls = [start_gateway(stack, tiers, name, redis.address) for name in ("killed", "other")]
        await asyncio.to_thread(tiers.wait_until, lambda: all(map(is_ready, urls)))
        yield urls, redis
        for name in ("killed", "other"):
            tiers.processes[name].kill()


async def test_streams_survive_a_gateway(
    stack: Stack, tiers: Tiers, requests: list[dict[str, Any]], undisturbed: list[Answer]
) -> None:
    """The store is Redis; tests/faults does the same with SQLite."""
    async with gateways(stack, tiers) as (urls, _):
        flowing, speaking = asyncio.Event(), asyncio.Event()
        counted = Counted()
        by_httpx2 = httpx2.AsyncClient(transport=AsyncResumingTransport(urls, counted), timeout=240)
        async with Client(urls) as http, by_httpx2:
            client = http.openai(urls[0])
            other = anthropic.AsyncAnthropic(base_url=urls[0], api_key="none", max_retries=0, http_client=by_httpx2)
            due = await message(other, lambda: None)
            asked = [asyncio.create_task(answer(client, request, flowing.set)) for request in requests]
            await flowing.wait()
            told = [asyncio.create_task(message(other, speaking.set)) for _ in range(NUM_MESSAGES)]
            await speaking.wait()
            tiers.processes["killed"].kill()
            assert await asyncio.gather(*asked) == undisturbed
            assert await asyncio.gather(*told) == [due] * NUM_MESSAGES
            assert (http.counted.num_resumed > 0, counted.num_resumed > 0) == (True, True)
    deadline = time.monotonic() + 240
    while stack.stats().blocks_used:  # the dead gateway's requests free their blocks
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", ["dies", "stands still"])
async def test_streams_survive_a_gateway_whose_store_is_gone_for_a_while(
    stack: Stack, tiers: Tiers, requests: list[dict[str, Any]], undisturbed: list[Answer], fault: str
) -> None:
    """No begun stream starts over: a client whose stream cannot be resumed yet asks again."""
    async with gateways(stack, tiers) as (urls, redis), Client(urls) as http:
        flowing = [asyncio.Event() for _ in requests]
        asked = asyncio.gather(
            *(answer(http.openai(urls[0]), *one) for one in zip(requests, [each.set for each in flowing], strict=True))
        )
        # A stream that begins without a store cannot be resumed.
        await asyncio.gather(*(one.wait() for one, request in zip(flowing, requests, strict=True) if request["stream"]))
        if fault == "dies":
            await redis.kill()
        else:
            redis.send(signal.SIGSTOP)
        tiers.processes["killed"].kill()
        refused = asyncio.create_task(http.counted.refused.wait())
        await asyncio.wait([refused, asked], return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        if fault == "dies":
            await redis.start()
        else:
            redis.send(signal.SIGCONT)
        assert await asked == undisturbed


def test_what_is_asked_again_is_answered_once(stack: Stack) -> None:
    fields = TALK | {"stream": False, "max_tokens": 8, "extra_headers": {"Idempotency-Key": "once"}}
    fields |= {"extra_body": {}, "seed": None, "temperature": 1.5}
    with stack.client() as client:
        first, again = (client.chat.completions.create(**fields) for _ in range(2))
        assert first.model_dump() == again.model_dump()
        with pytest.raises(openai.UnprocessableEntityError, match="Idempotency-Key"):
            client.chat.completions.create(**fields | {"max_tokens": 9})
