"""The same transports for httpx2, which newer clients use, Anthropic's among them: converts requests, responses and
errors between the two packages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import httpx
import httpx2

from pagoda.client import transport as of_httpx
from pagoda.client.going import MAX_FAILURES


class ResumingTransport(httpx2.BaseTransport):
    """For `httpx2.Client`; like httpx's, which makes the connections."""

    def __init__(
        self,
        base_urls: Sequence[str] = (),
        transport: httpx.BaseTransport | None = None,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        """Raises ValueError for a URL that cannot be used."""
        self._transport = of_httpx.ResumingTransport(base_urls, transport, max_failures)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        with _renamed_errors():
            response = self._transport.handle_request(_handed_over(request))
        return _read(response) if response.is_stream_consumed else _unread(response, _Stream(response))

    def close(self) -> None:
        self._transport.close()


class AsyncResumingTransport(httpx2.AsyncBaseTransport):
    """For `httpx2.AsyncClient`; like httpx's, which makes the connections."""

    def __init__(
        self,
        base_urls: Sequence[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        """Raises ValueError for a URL that cannot be used."""
        self._transport = of_httpx.AsyncResumingTransport(base_urls, transport, max_failures)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        with _renamed_errors():
            response = await self._transport.handle_async_request(_handed_over(request))
        return _read(response) if response.is_stream_consumed else _unread(response, _AsyncStream(response))

    async def aclose(self) -> None:
        await self._transport.aclose()


class _Stream(httpx2.SyncByteStream):
    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        with _renamed_errors():
            yield from cast(httpx.SyncByteStream, self._response.stream)

    def close(self) -> None:
        self._response.close()


class _AsyncStream(httpx2.AsyncByteStream):
    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _renamed_errors():
            async for data in cast(httpx.AsyncByteStream, self._response.stream):
                yield data

    async def aclose(self) -> None:
        await self._response.aclose()


def _handed_over(request: httpx2.Request) -> httpx.Request:
    """`request` must have been read. Accepts only encodings that httpx can decode; httpx2 may know more."""
    headers, extensions = httpx.Headers(request.headers.raw), dict(request.extensions)
    if "Accept-Encoding" in headers:
        headers["Accept-Encoding"] = "gzip, deflate"
    return httpx.Request(
        request.method, str(request.url), headers=headers, content=request.content, extensions=extensions
    )


def _unread(response: httpx.Response, stream: _Stream | _AsyncStream) -> httpx2.Response:
    headers, extensions = response.headers.raw, dict(response.extensions)
    return httpx2.Response(response.status_code, headers=headers, stream=stream, extensions=extensions)


def _read(response: httpx.Response) -> httpx2.Response:
    """The content is already decoded, so headers about its encoding and length are dropped."""
    told = ((name, value) for name, value in response.headers.raw if name.lower() not in _OF_WHAT_WAS_SENT)
    return httpx2.Response(response.status_code, headers=list(told), content=response.content)


_OF_WHAT_WAS_SENT = (b"content-encoding", b"content-length", b"transfer-encoding")


@contextmanager
def _renamed_errors() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise getattr(httpx2, type(error).__name__, httpx2.TransportError)(str(error)) from error
