"""On real sockets: a request too many is refused before its body arrives, and no other request is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.fakes_engine import MODEL, Script, failing, play
from tests.gateway.http_fakes import error_code, parse, running_http
from tests.gateway.keys.whole_app import App, running_app

from pagoda_gateway.engine.refusals import REPEATED_S, Kind, Refusals
from pagoda_proto.errors import ErrorCode, PagodaError

PATH = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3}).encode()
FULL = PagodaError(ErrorCode.OVERLOADED, "no", retry_after_s=4.0)
KEYS = ("key-of-one-tenant", "key-of-another-tenant")

Answer = tuple[int, dict[str, str], bytes]


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *headers: str, body: bytes = BODY, length: int | None = None, path: str = PATH) -> None:
        size = len(BODY) if length is None else length
        lines = [f"POST {path} HTTP/1.1", "host: h", "content-type: application/json", f"content-length: {size}"]
        self._writer.write("\r\n".join([*lines, *headers, "", ""]).encode() + body)

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> Answer:
        head = await self._reader.readuntil(b"\r\n\r\n")
        status, headers, _ = parse(head)
        return status, headers, await self._reader.readexactly(int(headers["content-length"]))

    async def asked(self, *headers: str, path: str = PATH) -> int:
        self.send(*headers, path=path)
        return (await self.answer())[0]

    async def ended(self) -> bool:
        return await self._reader.read() == b""


class Place:
    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.now = 0.0
        self.engine = app.gateway.engine
        self.engine.refusals = Refusals(lambda code: None, lambda: self.now)
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def client(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        return Client(reader, writer)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def refuse(self, policy: str = "fcfs", tenant: str = "", priority: int = 0, timeout_s: float = 0.0) -> None:
        """As if an engine core with that policy had just refused a request."""
        self.engine.load = msgspec.structs.replace(self.engine.load, policy=policy)
        self.engine.refusals.came(Kind.under(policy, tenant, priority, timeout_s), FULL)


@asynccontextmanager
async def place(root: Path, script: Script | None = None, **config: Any) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        given = {"admin_api_key": ""} | config
        app = await stack.enter_async_context(running_app(root, script or play([5, 6, 7]), **given))
        running = await stack.enter_async_context(running_http(app.asgi, app.gateway.context.config))
        found = Place(app, running.port)
        stack.callback(found.close)
        yield found


def told(answer: Answer) -> Any:
    """The answer without times."""
    status, headers, body = answer
    return status, {k: v for k, v in headers.items() if k not in ("date", "openai-processing-ms")}, json.loads(body)


async def test_it_is_told_what_the_one_before_it_was_told_and_before_its_body_comes(tmp_path: Path) -> None:
    async with place(tmp_path, failing(retry_after_s=4.0)) as here:
        client, name = await here.client(), "x-request-id: abc"
        client.send(name)
        before = await client.answer()
        here.refuse()
        client.send(name, body=b"")
        after = await client.answer()
        assert told(after) == told(before)
        assert (after[0], error_code(after[2])) == (503, "overloaded")
        assert (after[1]["retry-after"], after[1]["x-request-id"]) == ("4", "abc")
        assert here.app.http_count(PATH, "5xx") == 2


async def test_its_connection_is_kept_and_what_comes_of_its_body_is_passed_over(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        client = await here.client()
        here.refuse()
        client.send(body=BODY[:5])
        assert (await client.answer())[0] == 503
        here.now += REPEATED_S
        client.send_bytes(BODY[5:])
        assert await client.asked() == 200
        assert len(here.engine.generations) == 1


@pytest.mark.parametrize("headers", [(), ("expect: 100-continue",), ("transfer-encoding: chunked",)])
async def test_a_connection_with_more_on_its_way_is_closed(tmp_path: Path, headers: tuple[str, ...]) -> None:
    async with place(tmp_path) as here:
        client = await here.client()
        here.refuse()
        if headers == ("transfer-encoding: chunked",):
            client.send_bytes(f"POST {PATH} HTTP/1.1\r\nhost: h\r\n{headers[0]}\r\n\r\n2\r\n{{}}\r\n".encode())
        else:
            client.send(*headers, body=b"", length=len(BODY) if headers else 10**6)
        status, told, _ = await client.answer()
        assert (status, told["connection"]) == (503, "close")
        assert await client.ended()


async def test_who_says_more_than_its_kind_is_asked_about(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        client = await here.client()
        here.refuse()
        assert await client.asked("idempotency-key: k-1") == 200, "it may have its answer already"
        assert await client.asked("request-timeout-ms: 60000") == 200, "that one did not"
        assert await client.asked("request-timeout-ms: soon") == 400, "it is told that"
        assert await client.asked(path="/tokenize") in (200, 400)
        assert await client.asked(path="/v1/responses") == 400, "it may be for the background"
        assert await client.asked() == 503
        here.refuse(timeout_s=60.0)
        assert await client.asked("request-timeout-ms: 60000") == 503
        client.send_bytes(b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await client.answer())[0] == 200
        here.now += REPEATED_S
        assert await client.asked() == 200, "nobody knows any more"


async def test_under_fair_turns_one_tenants_refusal_is_its_own(tmp_path: Path) -> None:
    async with place(tmp_path, api_key=",".join(KEYS)) as here:
        client, (one, other) = await here.client(), [f"authorization: Bearer {key}" for key in KEYS]
        assert await client.asked(one) == 200
        here.refuse("fair", here.engine.record.tenant)
        assert (await client.asked(one), await client.asked(other)) == (503, 200)
        here.refuse("fcfs")
        assert (await client.asked(one), await client.asked(other)) == (503, 503)


async def test_who_may_ask_to_go_first_is_not_refused_with_those_behind(tmp_path: Path) -> None:
    async with place(tmp_path, min_priority=-5) as here:
        client = await here.client()
        here.refuse("priority", priority=0)
        assert await client.asked() == 200, "its body may say -5"
        here.refuse("priority", priority=-5)
        assert await client.asked() == 503


async def test_sec_22_nobody_without_a_key_is_told_that_it_is_full(tmp_path: Path) -> None:
    async with place(tmp_path, api_key=KEYS[0]) as here:
        client = await here.client()
        here.refuse()
        assert await client.asked() == 401
