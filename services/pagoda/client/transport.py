"""Resumes a broken stream at the next gateway, after the last event passed on, so that the caller sees one stream. Two
transports do the same, one synchronous and one asynchronous.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import cast

import httpx

from pagoda.client.going import MAX_FAILURES, Going, is_generating, is_stream, not_resumed, origins_of


class ResumingTransport(httpx.BaseTransport):
    """For `httpx.Client`.

    Args:
        base_urls: Gateways that share a store, tried in turn; only the request's own if none is given.
        transport: Makes the connections; httpx's own if none is given. It is closed with this one.
        max_failures: Limit of consecutive connections that yield nothing.
    """

    def __init__(
        self,
        base_urls: Sequence[str] = (),
        transport: httpx.BaseTransport | None = None,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        """Raises ValueError for a URL that cannot be used."""
        self._origins = origins_of(base_urls)
        self._transport = transport or httpx.HTTPTransport()
        self._max_failures = max_failures

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not is_generating(request):
            return self._transport.handle_request(request)
        request.read()
        going = Going(request, self._origins, self._max_failures)
        response = self.open(going)
        if not is_stream(response):
            return response
        going.begun = True
        stream = _Stream(self, going, response)
        return httpx.Response(200, headers=response.headers, stream=stream, extensions=response.extensions)

    def open(self, going: Going) -> httpx.Response:
        """Returns a stream, or an answer that has been read. Raises httpx.TransportError after too many failures."""
        while True:
            try:
                response = self._transport.handle_request(going.request())
                if is_stream(response):
                    return response
                response.read()
            except httpx.TransportError as error:
                going.unanswered(error)
                if (pause_s := going.pause_s()) is None:
                    raise
            else:
                pause_s = going.pause_s() if going.may_try_again(response) else None
                if pause_s is None:
                    if going.begun:
                        raise not_resumed(response)
                    return response
            time.sleep(pause_s)

    def close(self) -> None:
        self._transport.close()


class _Stream(httpx.SyncByteStream):
    def __init__(self, transport: ResumingTransport, going: Going, response: httpx.Response) -> None:
        self._transport = transport
        self._going = going
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        going, events = self._going, self._going.events
        while True:
            broken: httpx.TransportError | None = None
            try:
                for data in cast(httpx.SyncByteStream, self._response.stream):
                    if told := going.feed(data):
                        yield told
                    if events.interrupted:
                        break
            except httpx.TransportError as error:
                broken = error
            self._response.close()
            if going.over(broken):
                return
            pause_s = going.pause_s()
            if pause_s is None and events.complaint:
                yield events.complaint
                return
            if pause_s is None:
                raise broken or httpx.RemoteProtocolError("the stream ended before its last event")
            time.sleep(pause_s)
            self._response = self._transport.open(going)
            if not is_stream(self._response):
                raise not_resumed(self._response)

    def close(self) -> None:
        self._response.close()


class AsyncResumingTransport(httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient`; like `ResumingTransport`."""

    def __init__(
        self,
        base_urls: Sequence[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        """Raises ValueError for a URL that cannot be used."""
        self._origins = origins_of(base_urls)
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._max_failures = max_failures

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not is_generating(request):
            return await self._transport.handle_async_request(request)
        await request.aread()
        going = Going(request, self._origins, self._max_failures)
        response = await self.open(going)
        if not is_stream(response):
            return response
        going.begun = True
        stream = _AsyncStream(self, going, response)
        return httpx.Response(200, headers=response.headers, stream=stream, extensions=response.extensions)

    async def open(self, going: Going) -> httpx.Response:
        """Returns a stream, or an answer that has been read. Raises httpx.TransportError after too many failures."""
        while True:
            try:
                response = await self._transport.handle_async_request(going.request())
                if is_stream(response):
                    return response
                await response.aread()
            except httpx.TransportError as error:
                going.unanswered(error)
                if (pause_s := going.pause_s()) is None:
                    raise
            else:
                pause_s = going.pause_s() if going.may_try_again(response) else None
                if pause_s is None:
                    if going.begun:
                        raise not_resumed(response)
                    return response
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        await self._transport.aclose()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, transport: AsyncResumingTransport, going: Going, response: httpx.Response) -> None:
        self._transport = transport
        self._going = going
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        going, events = self._going, self._going.events
        while True:
            broken: httpx.TransportError | None = None
            try:
                async for data in cast(httpx.AsyncByteStream, self._response.stream):
                    if told := going.feed(data):
                        yield told
                    if events.interrupted:
                        break
            except httpx.TransportError as error:
                broken = error
            await self._response.aclose()
            if going.over(broken):
                return
            pause_s = going.pause_s()
            if pause_s is None and events.complaint:
                yield events.complaint
                return
            if pause_s is None:
                raise broken or httpx.RemoteProtocolError("the stream ended before its last event")
            await asyncio.sleep(pause_s)
            self._response = await self._transport.open(going)
            if not is_stream(self._response):
                raise not_resumed(self._response)

    async def aclose(self) -> None:
        await self._response.aclose()
