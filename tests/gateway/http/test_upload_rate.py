"""A client that uploads too fast is slowed down, and no other client is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from tests.gateway.fake_engine_core import until
from tests.gateway.http_fakes import Running, error_code, limited, parse, running_http, talk

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.limits import LimitsMiddleware
from pagoda_gateway.http.upload_rate import BURST_S, FREE_BYTES, MAX_WAIT_S, UploadRate

RATE = 1000.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500), st.floats(0.0, 0.5)), max_size=40))
def test_who_waits_is_never_faster_than_the_rate(parts: list[tuple[str, int, float]]) -> None:
    rate = UploadRate(RATE)
    now = 100.0
    may_read_at = dict.fromkeys("abc", now)
    taken = dict.fromkeys("abc", 0)
    for client, num_bytes, later_s in parts:
        now += later_s
        if now >= may_read_at[client]:
            taken[client] += num_bytes
            may_read_at[client] = now + rate.take(client, num_bytes, now)
        assert taken[client] <= RATE * (may_read_at[client] - 100.0 + BURST_S) + 1e-6


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.0, 1.0)), min_size=1, max_size=20))
def test_a_client_owes_what_it_would_alone(parts: list[tuple[int, float]]) -> None:
    alone, beside = UploadRate(RATE), UploadRate(RATE)
    now = 100.0
    for num_bytes, later_s in parts:
        now += later_s
        beside.take("other", 10 * num_bytes, now)
        assert beside.take("a", num_bytes, now) == alone.take("a", num_bytes, now)


def test_connections_of_one_client_share_its_line() -> None:
    rate = UploadRate(RATE)
    owed = [rate.take("a", 1000, 100.0) for _ in range(3)]
    assert [round(seconds + BURST_S, 6) for seconds in owed] == [1.0, 2.0, 3.0]
    assert rate.take("a", 10, 200.0) == 0.0


def test_who_owes_nothing_is_forgotten() -> None:
    rate = UploadRate(RATE)
    for i in range(100):
        rate.take(str(i), 10, 100.0)
    assert len(rate) == 100
    rate.take("a", 10, 101.0)
    assert len(rate) == 1


async def whole(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body."""
    size = str(len((await receive())["body"])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(size))]})
    await send({"type": "http.response.body", "body": size, "more_body": False})


@asynccontextmanager
async def serving(**fields: int | float) -> AsyncIterator[tuple[Running, LimitsMiddleware]]:
    config = GatewayConfig(engine="unix:/x", **fields)
    app = limited(whole, config)
    async with running_http(app, config) as http:
        yield http, app


def upload(client: str, size: int) -> bytes:
    lines = ["POST / HTTP/1.1", "host: h", f"x-forwarded-for: {client}", f"content-length: {size}", "connection: close"]
    return "\r\n".join([*lines, "", ""]).encode() + b"x" * size


async def test_an_upload_over_the_rate_takes_its_time_and_no_blame() -> None:
    """If throttled time counted as the client's, its deadline would have passed long before."""
    size, rate = FREE_BYTES + 1_500_000, 1_000_000
    async with serving(max_upload_bytes_per_second=rate, body_timeout_s=0.5) as (http, _):
        begun_at = time.monotonic()
        status, _, body = await talk(http.port, upload("1.1.1.1", size))
        assert (status, int(body)) == (200, size)
        unpaid = 400_000  # the client's next upload pays for the last read
        assert time.monotonic() - begun_at >= (1_500_000 - unpaid) / rate - BURST_S


async def test_only_large_uploads_of_one_address_wait() -> None:
    async with serving(max_upload_bytes_per_second=FREE_BYTES) as (http, app):
        greedy = asyncio.create_task(talk(http.port, upload("1.1.1.1", 8_000_000)))
        await until(lambda: app._memory.held_bytes > 0)
        assert int((await talk(http.port, upload("2.2.2.2", FREE_BYTES + 1000)))[2]) == FREE_BYTES + 1000
        assert int((await talk(http.port, upload("1.1.1.1", FREE_BYTES)))[2]) == FREE_BYTES
        assert not greedy.done()
        greedy.cancel()


async def test_sec_20_who_sends_too_much_at_once_is_refused_and_one_upload_never_is() -> None:
    async with serving(max_upload_bytes_per_second=FREE_BYTES) as (http, _):
        answers = await asyncio.gather(*(talk(http.port, upload("1.1.1.1", 2 * FREE_BYTES + 1)) for _ in range(8)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 503}
        late = next(headers for status, headers, _ in answers if status == 503)
        assert int(late["retry-after"]) >= MAX_WAIT_S
        assert (await talk(http.port, upload("2.2.2.2", 4 * FREE_BYTES)))[0] == 200


async def test_sec_20_what_a_client_left_behind_is_not_kept() -> None:
    """The protocol and its request refer to each other, and may stay in memory until they are collected."""
    came = asyncio.Event()
    bodies: list[bytes] = []

    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        cycle = receive.__self__  # type: ignore[attr-defined]
        await until(lambda: len(cycle.body) > 1000)
        came.set()
        await until(lambda: cycle.disconnected)
        bodies.append(cycle.body)

    config = GatewayConfig(engine="unix:/x")
    async with running_http(never, config) as http:
        _, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(upload("1.1.1.1", 4000)[:-1000])
        await came.wait()
        writer.transport.abort()
        await until(lambda: bool(bodies))
    assert bodies == [b""]


async def test_what_is_read_after_a_refusal_counts() -> None:
    """The answer still arrives, and the rest of the upload is left unread."""
    size = 16_000_000
    async with serving(max_upload_bytes_per_second=FREE_BYTES, max_body_bytes=1000) as (http, app):
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(upload("1.1.1.1", size))
        status, headers, _ = parse(await reader.readuntil(b"\r\n\r\n"))
        answer = await reader.readexactly(int(headers["content-length"]))
        assert (status, error_code(answer)) == (413, "request_too_large")
        await until(lambda: not http.server.server_state.connections)
        owed_s = app._rate.take("1.1.1.1", 1, time.monotonic())
        assert 0 < owed_s < size / FREE_BYTES / 2
        writer.close()
