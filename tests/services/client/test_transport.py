"""Whatever connections do, the caller sees every event once, or an error; every attempt sends the same request."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import httpx2
import pytest

from pagoda.client import httpx2_transport
from pagoda.client.transport import AsyncResumingTransport, ResumingTransport
from pagoda_proto import times

PATH = "/v1/chat/completions"
EVENTS = [f"id: s:00000000:0:{i}.{i}\ndata: {i}\n\n".encode() for i in range(4)] + [b"data: [DONE]\n\n"]
STREAM = {"content-type": "text/event-stream; charset=utf-8"}
BASES = ("http://a:1/v1", "http://b:2/v1")


class Bytes(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off after `data`, unless it is `whole`."""

    def __init__(self, data: bytes, whole: bool) -> None:
        self._data, self._whole = data, whole

    def __iter__(self) -> Iterator[bytes]:
        yield self._data
        if not self._whole:
            raise httpx.RemoteProtocolError("peer closed connection")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self:
            yield data


class Gateways(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Each connection gets the next of `answers`: a number of bytes to send, a response, or an error."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        last = request.headers.get("Last-Event-ID")
        begin = (
            0 if last is None else 1 + next(i for i, event in enumerate(EVENTS) if f"id: {last}\n".encode() in event)
        )
        rest = b"".join(EVENTS[begin:])
        return httpx.Response(200, headers=STREAM, stream=Bytes(rest[:answer], whole=answer >= len(rest)))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


def asked(gateways: Gateways, **options: Any) -> bytes:
    with httpx.Client(transport=ResumingTransport(BASES, gateways, **options)) as client:
        return client.post(f"http://a:1{PATH}", json={"stream": True}).content


async def _awaited(gateways: Gateways, **options: Any) -> bytes:
    async with httpx.AsyncClient(transport=AsyncResumingTransport(BASES, gateways, **options)) as client:
        return (await client.post(f"http://a:1{PATH}", json={"stream": True})).content


def awaited(gateways: Gateways, **options: Any) -> bytes:
    return asyncio.run(_awaited(gateways, **options))


@contextmanager
def of_httpx() -> Iterator[None]:
    """Translate errors of httpx2 into those of httpx, which have the same names."""
    try:
        yield
    except httpx2.TransportError as error:
        raise getattr(httpx, type(error).__name__)(str(error)) from error


def asked_by_httpx2(gateways: Gateways, **options: Any) -> bytes:
    transport = httpx2_transport.ResumingTransport(BASES, gateways, **options)
    with of_httpx(), httpx2.Client(transport=transport) as client:
        return client.post(f"http://a:1{PATH}", json={"stream": True}).content


async def _awaited_by_httpx2(gateways: Gateways, **options: Any) -> bytes:
    transport = httpx2_transport.AsyncResumingTransport(BASES, gateways, **options)
    with of_httpx():
        async with httpx2.AsyncClient(transport=transport) as client:
            return (await client.post(f"http://a:1{PATH}", json={"stream": True})).content


def awaited_by_httpx2(gateways: Gateways, **options: Any) -> bytes:
    return asyncio.run(_awaited_by_httpx2(gateways, **options))


pytestmark = pytest.mark.parametrize("ask", [asked, awaited, asked_by_httpx2, awaited_by_httpx2])
Ask = Callable[..., bytes]
WHOLE = b"".join(EVENTS)
GONE = httpx.ConnectError("refused")


@pytest.mark.parametrize("first", [0, 5, len(EVENTS[0]), len(EVENTS[0]) + 7, len(WHOLE) - 1, len(WHOLE)])
def test_a_stream_that_breaks_is_gone_on_with(ask: Ask, first: int) -> None:
    gateways = Gateways(first, 40, GONE, 10**6)
    assert ask(gateways) == WHOLE
    assert len({request.headers["Idempotency-Key"] for request in gateways.asked}) == 1
    assert len({request.content for request in gateways.asked}) == 1
    assert [request.url.host for request in gateways.asked] == ["a", "b", "a", "b"][: len(gateways.asked)]
    assert [request.headers["Host"] for request in gateways.asked][:2] == ["a:1", "b:2"][: len(gateways.asked)]


def test_one_that_ends_without_its_last_event_is_gone_on_with(ask: Ask) -> None:
    cut = httpx.Response(200, headers=STREAM, stream=Bytes(EVENTS[0], whole=True))
    assert ask(Gateways(cut, 10**6)) == WHOLE


def test_what_broke_before_its_first_event_is_asked_for_until_somebody_can_go_on(ask: Ask) -> None:
    """A gateway whose store is down for a moment cannot know whether the stream has begun."""
    broke = httpx.ReadError("reset")
    gateways = Gateways(broke, *(httpx.Response(503) for _ in range(3)), 10**6)
    assert ask(gateways) == WHOLE
    assert len(gateways.asked) == 5
    gateways = Gateways(broke, *(httpx.Response(503) for _ in range(9)))
    assert ask(gateways, max_failures=3) == b""
    assert len(gateways.asked) == 4
    gateways = Gateways(broke, GONE, GONE, 10**6)
    assert ask(gateways) == WHOLE
    assert len({request.headers["Idempotency-Key"] for request in gateways.asked}) == 1


@pytest.mark.parametrize("first", [GONE, httpx.PoolTimeout("none is free"), httpx.ReadTimeout("silent")])
def test_what_was_begun_nowhere_or_waited_for_long_enough_is_tried_once_at_each(ask: Ask, first: Exception) -> None:
    gateways = Gateways(first, *(httpx.Response(503) for _ in range(9)))
    assert ask(gateways) == b""
    assert len(gateways.asked) == 2
    gateways = Gateways(httpx.ReadError("reset"), httpx.ReadTimeout("silent"), 10**6)
    with pytest.raises(httpx.ReadTimeout):
        ask(gateways)


def test_a_wish_to_be_asked_later_is_heard_as_far_as_patience_goes(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another gateway may be available sooner than Retry-After says."""
    monkeypatch.setattr(times, "RECONNECT_MOST_S", 0.3)
    busy = httpx.Response(503, headers={"retry-after": "60"})
    began = time.monotonic()
    assert ask(Gateways(httpx.ReadError("reset"), busy, busy, 10**6)) == WHOLE
    assert time.monotonic() - began >= 2 * 0.3
    assert ask(Gateways(60, busy, busy, 10**6)) == WHOLE


def test_a_gateway_that_says_it_cannot_go_on_is_left(ask: Ask) -> None:
    said = b'data: {"error":{"code":"unavailable"}}\n\n'
    cut = httpx.Response(200, headers=STREAM, stream=Bytes(EVENTS[0] + said, whole=True))
    assert ask(Gateways(cut, 10**6)) == WHOLE
    assert ask(Gateways(cut, *[GONE] * 3), max_failures=0) == EVENTS[0] + said


def test_the_first_connection_is_tried_at_every_gateway(ask: Ask) -> None:
    assert ask(Gateways(GONE, 10**6)) == WHOLE
    assert ask(Gateways(httpx.Response(503), 10**6)) == WHOLE
    in_progress = [httpx.Response(409, headers={"x-should-retry": "true"}) for _ in range(4)]
    assert ask(Gateways(*in_progress, httpx.Response(200, text="x"))) == b"x"
    assert ask(Gateways(httpx.Response(409, text="no"))) == b"no"
    assert ask(Gateways(httpx.Response(400, text="no"))) == b"no"
    with pytest.raises(httpx.ConnectError):
        ask(Gateways(GONE, GONE))


def test_it_is_enough_some_time(ask: Ask) -> None:
    with pytest.raises(httpx.TransportError):
        ask(Gateways(60, *[GONE] * 4), max_failures=3)
    with pytest.raises(httpx.RemoteProtocolError, match="404"):
        ask(Gateways(60, httpx.Response(404, text="gone")))


def test_what_has_no_ids_is_not_asked_for_again(ask: Ask) -> None:
    for whole in (True, False):
        plain = httpx.Response(200, headers=STREAM, stream=Bytes(b"data: 1\n\n", whole))
        if whole:
            assert ask(Gateways(plain)) == b"data: 1\n\n"
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                ask(Gateways(plain))


def test_a_url_that_is_none_is_refused(ask: Ask) -> None:
    for urls in (["gateway"], ["ftp://a"], ["http://a/v1", "http://b/v2"]):
        for transport in (ResumingTransport, httpx2_transport.ResumingTransport):
            with pytest.raises(ValueError):
                transport(urls)


def test_an_answer_that_was_packed_is_unpacked_once(ask: Ask) -> None:
    packed = httpx.Response(200, headers={"content-encoding": "gzip"}, content=gzip.compress(b"told" * 100))
    assert ask(Gateways(packed)) == b"told" * 100
