"""A server at its connection limit still answers health checks, and nobody can occupy the spare connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from starlette.types import Receive, Scope, Send
from tests.gateway.fake_engine_core import until
from tests.gateway.http_fakes import Running, error_code, limited, parse, running_http, talk

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.spare import SPARE_PLACES, SPARE_PLACES_PER_CLIENT, SparePlaces, asks_health

LIVE = b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n"
OTHER = b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n"
FULL = {"max_connections": 1}
FULL_OF_ONE = {"max_connections_per_client": 1}


@dataclass(eq=False)
class Silent:
    asked: bool = False
    out: bool = False

    def put_out(self) -> None:
        self.out = True


def test_who_has_its_share_makes_room_for_itself_and_for_nobody_else() -> None:
    places = SparePlaces()
    probe, mine = Silent(), [Silent() for _ in range(SPARE_PLACES_PER_CLIENT)]
    assert all(places.take(each, client) for each, client in [(probe, "probe"), *((each, "a") for each in mine)])
    assert places.take(Silent(), "a")
    assert [each.out for each in (probe, *mine)] == [False, True, *[False] * (len(mine) - 1)]
    assert len(places) == 1 + SPARE_PLACES_PER_CLIENT


def test_of_many_clients_those_make_room_who_have_most() -> None:
    places = SparePlaces()
    probe = Silent()
    places.take(probe, "probe")
    taken = [Silent() for _ in range(SPARE_PLACES - 1)]
    assert all(places.take(each, str(i // SPARE_PLACES_PER_CLIENT)) for i, each in enumerate(taken))
    for i in range(SPARE_PLACES // 2):
        assert places.take(Silent(), f"another {i}")
    assert len(places) == SPARE_PLACES
    assert sum(each.out for each in taken) == SPARE_PLACES // 2
    assert not probe.out


def test_who_is_being_answered_stays() -> None:
    places = SparePlaces()
    asking = [Silent(asked=True) for _ in range(SPARE_PLACES_PER_CLIENT)]
    assert all(places.take(each, "a") for each in asking)
    assert not places.take(Silent(), "a")
    places.leave(asking[0])
    places.leave(asking[0])
    assert places.take(Silent(), "a")
    assert not any(each.out for each in asking)


@pytest.mark.parametrize(
    ("target", "headers", "answered"),
    [
        (b"/health/live", [], True),
        (b"/ping?x=1", [(b"content-length", b" 0")], True),
        (b"/health/live/", [], False),
        (b"/v1/models?/health/live", [], False),
        (b"/health%2flive", [], False),
        (b"/health/live", [(b"content-length", b"1")], False),
        (b"/health/live", [(b"transfer-encoding", b"chunked")], False),
    ],
)
def test_health_is_asked_for_by_its_own_path_and_without_a_body(
    target: bytes, headers: list[tuple[bytes, bytes]], answered: bool
) -> None:
    assert asks_health(target, headers) == answered


class Busy:
    """Answers at once, except for /busy, which runs until `done`."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.done = asyncio.Event()
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/busy":
            self.begun.set()
            await self.done.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@asynccontextmanager
async def full(busy: Busy, limits: dict[str, int]) -> AsyncIterator[Running]:
    config = GatewayConfig(forwarded_allow_ips="", **limits)
    async with running_http(limited(busy, config), config) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(b"GET /busy HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        await busy.begun.wait()
        yield http
        busy.done.set()
        assert parse(await reader.read())[0] == 200
        writer.close()


@pytest.mark.parametrize("limits", [FULL, FULL_OF_ONE])
async def test_sec_24_a_full_server_tells_its_health_and_nothing_else(limits: dict[str, int]) -> None:
    busy = Busy()
    async with full(busy, limits) as http:
        for _ in range(2 * SPARE_PLACES):
            status, headers, _ = await talk(http.port, LIVE)
            assert (status, headers["connection"]) == (200, "close")
            status, headers, body = await talk(http.port, OTHER)
            assert (status, error_code(body), headers["connection"]) == (503, "overloaded", "close")
        with_body = b"POST /health/live HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n"
        too_many = LIVE[:-2] + b"x: y\r\n" * 100 + b"content-length: 9\r\n\r\n"
        too_long = LIVE[:-2] + b"x: " + b"y" * 20_000 + b"\r\n\r\n"
        for data in (with_body, with_body + b"123456789", too_many, too_long):
            assert (await talk(http.port, data))[0] == 503
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(LIVE + OTHER + LIVE)
        assert (await reader.read()).count(b"HTTP/1.1") <= 1
        writer.close()
        assert (await talk(http.port, b"nonsense\r\n\r\n"))[0] == 400
        assert set(busy.paths) == {"/busy", "/health/live"}


async def test_sec_24_who_says_nothing_holds_no_spare_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floods come from the same address, and from many others."""
    monkeypatch.setattr("pagoda_gateway.http.protocol.SPARE_S", 60.0)
    async with full(Busy(), FULL) as http:
        flood = [
            await asyncio.open_connection("127.0.0.1", http.port, local_addr=(f"127.0.1.{1 + i % 40}", 0))
            for i in range(5 * SPARE_PLACES)
        ]
        for _, writer in flood:
            writer.write(b"GET /health/live HT")
        assert (await talk(http.port, LIVE))[0] == 200
        await until(lambda: len(http.server.server_state.connections) <= 1 + SPARE_PLACES)
        status, _, body = parse(await flood[0][0].read())
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        for _, writer in flood:
            writer.close()


async def test_a_spare_place_is_given_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_gateway.http.protocol.SPARE_S", 0.1)
    async with full(Busy(), FULL) as http:
        for data in (b"", b"GET /health/live HT"):
            status, headers, body = await talk(http.port, data)
            assert (status, error_code(body)) == (503, "overloaded")
            assert int(headers["retry-after"]) >= 1
        await until(lambda: len(http.server.server_state.connections) == 1)
