"""The small HTTP client: however the bytes are cut, the answer is the same; a broken one is an error, not a hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.services.sse_server import SseServer, listening, serving

from pagoda.tools.http_stream import Connection, HttpAnswer, HttpError, StaleConnection, Target, _Parser

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
BODY = b'data: {"a": 1}\n\n: ping\n\nid: 7\ndata: {"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, rest = b"", body
    for size in sizes:
        part, rest = rest[:size], rest[size:]
        if part:
            out += b"%x;ext=1\r\n" % len(part) + part + b"\r\n"
    if rest:
        out += b"%x\r\n" % len(rest) + rest + b"\r\n"
    return out + b"0\r\n\r\n"


def parse(data: bytes, cuts: list[int]) -> tuple[list[bytes], bool, HttpAnswer]:
    events: list[bytes] = []
    parser = _Parser(lambda now, event: events.append(event))
    done, start = False, 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        if end > start:
            done = parser.feed(0.0, data[start:end])
            start = end
    return events, done, parser.answer()


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(sizes=st.lists(st.integers(1, 40), max_size=8), cuts=cuts)
def test_a_chunked_event_stream_cut_anywhere(sizes: list[int], cuts: list[int]) -> None:
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, sizes)
    events, done, answer = parse(data, cuts)
    assert (events, done, answer.status) == (EVENTS, True, 200)


@given(cuts=cuts)
def test_an_event_stream_of_known_length_cut_anywhere(cuts: list[int]) -> None:
    events, done, _ = parse(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, cuts)
    assert (events, done) == (EVENTS, True)


@given(cuts=cuts)
def test_a_plain_answer_cut_anywhere(cuts: list[int]) -> None:
    data = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 5\r\n\r\nwrong"
    assert parse(data, cuts) == ([], True, HttpAnswer(404, b"wrong"))


@pytest.mark.parametrize("data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000])
def test_what_is_no_http_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        parse(data, [])


@pytest.mark.parametrize(
    ("url", "host", "port", "line"),
    [
        ("http://h:1", "h", 1, b"GET /v1/x HTTP/1.1"),
        ("http://h:1/v1", "h", 1, b"GET /v1/x HTTP/1.1"),
        ("http://h/api/v1/", "h", 80, b"GET /api/v1/x HTTP/1.1"),
        ("https://h", "h", 443, b"GET /v1/x HTTP/1.1"),
    ],
)
def test_a_base_url_may_end_in_v1(url: str, host: str, port: int, line: bytes) -> None:
    target = Target(url)
    assert (target.host, target.port) == (host, port)
    assert target.request("GET", "/v1/x").split(b"\r\n")[0] == line


def test_the_key_is_sent_as_bearer_token() -> None:
    assert b"\r\nAuthorization: Bearer secret\r\n" in Target("http://h", "secret").request("GET", "/")


async def exchange(target: Target, connection: Connection, timeout_s: float = 30.0) -> HttpAnswer:
    request = target.request("POST", "/v1/completions", b'{"prompt": [1], "max_tokens": 2}')
    return await connection.exchange(request, lambda now, event: None, timeout_s)


async def test_a_connection_is_used_again() -> None:
    async with serving(SseServer()) as server:
        target = Target(server.url)
        connection = await Connection.open(target)
        assert [(await exchange(target, connection)).status for _ in range(3)] == [200, 200, 200]
        assert server.connections == 1
        connection.close()


async def test_a_kept_connection_that_was_closed_is_stale() -> None:
    async with serving(SseServer(close_after_answer=True)) as server:
        target = Target(server.url)
        connection = await Connection.open(target)
        await exchange(target, connection)
        with pytest.raises(StaleConnection):
            await exchange(target, connection)


@contextlib.asynccontextmanager
async def saying(words: bytes, *, then_close: bool) -> AsyncIterator[Target]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(words)
        if not then_close:
            await reader.read()

    async with listening(handle) as url:
        yield Target(url)


async def test_an_answer_that_breaks_off_is_an_error() -> None:
    async with saying(HEAD + b"Content-Length: 100\r\n\r\ndata", then_close=True) as target:
        with pytest.raises(HttpError, match="before the answer was complete"):
            await exchange(target, await Connection.open(target))


async def test_an_answer_without_length_ends_with_the_connection() -> None:
    async with saying(b"HTTP/1.0 200 OK\r\n\r\nall of it", then_close=True) as target:
        assert (await exchange(target, await Connection.open(target))).body == b"all of it"


async def test_an_answer_that_does_not_come_is_an_error() -> None:
    async with saying(b"", then_close=False) as target:
        with pytest.raises(HttpError, match=r"within 0\.05 s"):
            await exchange(target, await Connection.open(target), timeout_s=0.05)


async def test_something_else_at_the_port_is_an_error() -> None:
    async with saying(b"SSH-2.0-nothing\r\n\r\n", then_close=False) as target:
        with pytest.raises(HttpError, match="not an HTTP answer"):
            await exchange(target, await Connection.open(target))


async def test_nothing_at_the_port_is_an_error() -> None:
    async with saying(b"", then_close=True) as target:
        pass
    with pytest.raises(HttpError, match="cannot connect"):
        await Connection.open(target)
