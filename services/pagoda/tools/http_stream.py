"""A small HTTP/1.1 client for streamed answers: one connection, one request at a time, little work per event.

It exists because a load generator must cost less than what it measures; `chat` and `complete` use it too.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_HEAD_BYTES = 64 * 1024
MAX_ERROR_BYTES = 64 * 1024

OnEvent = Callable[[float, bytes], None]


class HttpError(Exception):
    """The exchange failed: no connection, a broken answer, or a timeout."""


class NotNow(HttpError):
    """The same may succeed later: no connection could be made, or the server, or a proxy before it, answers so."""


NOT_NOW = frozenset((502, 503, 504))


def refused(status: int, message: str) -> HttpError:
    return (NotNow if status in NOT_NOW else HttpError)(message)


class StaleConnection(HttpError):
    """A kept connection was closed before any of the answer arrived; a retry on another one may succeed."""


@dataclass
class Target:
    """Where requests go. `base_url` may end in /v1, as OpenAI clients are given it."""

    base_url: str
    api_key: str = ""
    host: str = field(init=False)
    port: int = field(init=False)
    tls: ssl.SSLContext | None = field(init=False)
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base URL must look like http://host:port, got {self.base_url!r}")
        self.host = url.hostname
        self.tls = ssl.create_default_context() if url.scheme == "https" else None
        self.port = url.port or (443 if self.tls else 80)
        self.prefix = url.path.rstrip("/").removesuffix("/v1")

    def request(self, method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
        """The bytes of a whole request; `headers` are whole lines."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Accept: */*"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@dataclass
class HttpAnswer:
    """An answer. `body` holds everything except an event stream, which went to `on_event`."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One keep-alive connection. After any HttpError it must not be used again."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._parser: _Parser | None = None
        self._used = False
        self.alive = False

    @staticmethod
    async def open(target: Target) -> Connection:
        """Raises NotNow."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=target.tls)
        except OSError as error:
            raise NotNow(f"cannot connect to {target.host}:{target.port}: {error.strerror or error}") from error
        return connection

    async def exchange(self, request: bytes, on_event: OnEvent, timeout_s: float) -> HttpAnswer:
        """Send a request and wait for the end of its answer; `on_event` gets each server-sent event as it arrives.

        Raises:
            HttpError: the answer did not come, is incomplete, or took longer than `timeout_s`.
        """
        if self._transport is None or not self.alive:
            raise StaleConnection("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = _Parser(on_event)
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answer
        except TimeoutError:
            self.close()
            raise HttpError(f"no complete answer within {timeout_s:g} s") from None
        finally:
            self._answer = None
        self._used = True
        if self._parser.close:
            self.close()
        return answer

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.alive = cast("asyncio.Transport", transport), True  # uvloop's is not a subclass

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        if self._answer is None or self._answer.done() or self._parser is None:
            return
        if self._parser.ends_with_connection:
            self._answer.set_result(self._parser.answer())
        elif self._used and not self._parser.begun:
            self._answer.set_exception(StaleConnection("the server closed a kept connection"))
        else:
            self._answer.set_exception(HttpError("the connection was closed before the answer was complete"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done() or self._parser is None:
            return
        try:
            if self._parser.feed(time.perf_counter(), data):
                self._answer.set_result(self._parser.answer())
        except ValueError as error:
            self._answer.set_exception(HttpError(f"not an HTTP answer: {error}"))
            self.close()


class _Parser:
    """Bytes of one answer in, events and a body out. httptools calls all methods `on_..` except `on_event`."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._head_bytes = 0
        self._in_head = True
        self._says_its_end = False
        self._events = False
        self._event = b""
        self._body = bytearray()
        self._complete = False
        self.status = 0
        self.close = False

    @property
    def begun(self) -> bool:
        return self._head_bytes > 0

    @property
    def ends_with_connection(self) -> bool:
        return not (self._in_head or self._says_its_end)

    def answer(self) -> HttpAnswer:
        return HttpAnswer(self.status, bytes(self._body))

    def feed(self, now: float, data: bytes) -> bool:
        """Take bytes; True when the answer is complete. Raises ValueError if they are not HTTP."""
        self._now = now
        self._head_bytes += len(data) if self._in_head else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            raise ValueError(str(error)) from error
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head of the answer is too long")
        return self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self._says_its_end |= name.lower() in (b"content-length", b"transfer-encoding")
        self._events |= name.lower() == b"content-type" and b"text/event-stream" in value.lower()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self.status = self._parser.get_status_code()
        self.close = not self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if not self._events:
            if self.status == 200 or len(self._body) < MAX_ERROR_BYTES:
                self._body += data
            return
        *complete, self._event = (self._event + data).split(b"\n\n")
        for event in complete:
            _, found, content = (b"\n" + event).partition(b"\ndata: ")
            if found:
                self._on_event(self._now, content)

    def on_message_complete(self) -> None:
        self._complete = True
