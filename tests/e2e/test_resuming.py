"""A gateway is killed under streams of OpenAI's client, which sees nothing of it: another one goes on with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bench.sides import is_ready
from tests.e2e.stack import Stack, free_port, running_stack
from tests.e2e.streams import FLOWING, MODEL, Seen, formed, plain
from tests.e2e.tiers import Tiers, tiers_apart
from tests.gateway.store.redis_server import running_redis

from pagoda.client.transport import AsyncResumingTransport

pytestmark = pytest.mark.e2e

CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Count."}], "stream": True, "max_tokens": 380,
    "temperature": 1.0, "seed": 5, "extra_body": {"ignore_eos": True},
}  # fmt: skip
# Texts, greedy and sampled, one of two choices; a schema, and a call.
REQUESTS = [plain(1), plain(4), formed(4), formed(5), CHAT]
Answer = tuple[list[Seen], dict[str, int]]


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
    """And one that ends by a stop string in the later half of what it says."""
    with stack.client() as client:
        told = client.chat.completions.create(**CHAT | {"stream": False}).choices[0].message.content or ""
    places = (i for i in range(len(told) // 2, len(told) - 4) if told.find(told[i : i + 4]) == i)
    at = next(places)
    return [*REQUESTS, CHAT | {"stop": [told[at : at + 4], "never said"]}]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, requests: list[dict[str, Any]]) -> list[Answer]:
    async def all_of_them() -> list[Answer]:
        async with stack.async_client() as client:
            return await asyncio.gather(*(answer(client, request) for request in requests))

    return asyncio.run(all_of_them())


class Counted(httpx.AsyncHTTPTransport):
    def __init__(self) -> None:
        super().__init__()
        self.num_resumed = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_resumed += "Last-Event-ID" in request.headers
        return await super().handle_async_request(request)


async def answer(client: openai.AsyncOpenAI, request: dict[str, Any], flowing: asyncio.Event | None = None) -> Answer:
    """What came of every choice, and the tokens used."""
    api: Any = client.chat.completions if "messages" in request else client.completions
    choices: dict[int, Seen] = {}
    usage: dict[str, int] = {}
    num_chunks = 0
    async for chunk in await api.create(**request, stream_options={"include_usage": True}):
        num_chunks += 1
        for choice in chunk.choices:
            choices.setdefault(choice.index, Seen()).add(choice)
        if chunk.usage is not None:
            usage = chunk.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"})
        if flowing is not None and num_chunks > FLOWING:
            flowing.set()
    return [choices[index] for index in sorted(choices)], usage


def start_gateway(stack: Stack, tiers: Tiers, name: str, store: str) -> str:
    port, engine = free_port(), next(stack.data_dir.rglob("engine*.sock"))
    options = ["--engine", f"unix:{engine}", "--port", str(port), "--served-model-name", MODEL, "--store", store]
    tiers.start(name, "gateway", *options)
    return f"http://127.0.0.1:{port}"


@asynccontextmanager
async def gateways(kind: str, stack: Stack, tiers: Tiers) -> AsyncIterator[tuple[str, str]]:
    """One to be killed, called by its kind, and one that lives; they share a store."""
    if kind == "sqlite":
        store = f"sqlite://{tiers.directory}/store.db"
        urls = [start_gateway(stack, tiers, kind, store), stack.url]
        await asyncio.to_thread(tiers.wait_until, lambda: all(map(is_ready, urls)))
        yield urls[0], urls[1]
        return
    async with running_redis() as redis:
        urls = [start_gateway(stack, tiers, name, redis.address) for name in (kind, "other")]
        await asyncio.to_thread(tiers.wait_until, lambda: all(map(is_ready, urls)))
        yield urls[0], urls[1]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_streams_survive_a_gateway(
    kind: str, stack: Stack, tiers: Tiers, requests: list[dict[str, Any]], undisturbed: list[Answer]
) -> None:
    async with gateways(kind, stack, tiers) as urls:
        transport, flowing = Counted(), asyncio.Event()
        http = httpx.AsyncClient(transport=AsyncResumingTransport(urls, transport), timeout=240)
        async with openai.AsyncOpenAI(
            base_url=f"{urls[0]}/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            asked = [asyncio.create_task(answer(client, request, flowing)) for request in requests]
            await flowing.wait()
            tiers.processes[kind].kill()
            assert await asyncio.gather(*asked) == undisturbed
        assert transport.num_resumed > 0
    deadline = time.monotonic() + 240
    while stack.stats().blocks_used:  # nothing is left of what the dead gateway had asked for
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_what_is_asked_again_is_answered_once(stack: Stack) -> None:
    fields = CHAT | {"stream": False, "max_tokens": 8, "extra_headers": {"Idempotency-Key": "once"}}
    fields |= {"extra_body": {}, "seed": None, "temperature": 1.5}
    with stack.client() as client:
        first, again = (client.chat.completions.create(**fields) for _ in range(2))
        assert first.model_dump() == again.model_dump()
        with pytest.raises(openai.UnprocessableEntityError, match="Idempotency-Key"):
            client.chat.completions.create(**fields | {"max_tokens": 9})
