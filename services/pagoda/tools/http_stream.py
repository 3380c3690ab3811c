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

MAX_HEAD_BYTES = 64 * 1024
MAX_ERROR_BYTES = 64 * 1024

OnEvent = Callable[[float, bytes], None]


class HttpError(Exception):
    """The exchange failed: no connection, a broken answer, too slow."""


class StaleConnection(HttpError):
    """A kept connection turned out to be closed before anything of the answer arrived; another one may do."""


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

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a whole request."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Accept: */*"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class HttpAnswer:
    """What came back. `body` holds everything but an event stream, which went to `on_event`."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One keep-alive connection. After any HttpError it is of no more use."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._parser: _Parser | None = None
        self._used = False
        self.alive = False

    @staticmethod
    async def open(target: Target) -> Connection:
        """Raises HttpError when the server cannot be reached."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=target.tls)
        except OSError as error:
            raise HttpError(f"cannot connect to {target.host}:{target.port}: {error.strerror or error}") from error
        return connection

    async def exchange(self, request: bytes, on_event: OnEvent, timeout_s: float) -> HttpAnswer:
        """Send a request and wait for the end of its answer; `on_event` gets each server-sent event as it arrives.

        Raises:
            HttpError: the answer did not come, or not whole, or not within `timeout_s`.
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
    """Bytes of one answer in, events and a body out."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._buffer = b""
        self._headers: dict[bytes, bytes] | None = None
        self._left: int | None = None  # bytes of the body (or of its current chunk) still to come; None: unknown
        self._chunked = False
        self._events = False
        self._event = b""
        self._body = bytearray()
        self.status = 0
        self.close = False

    @property
    def begun(self) -> bool:
        return bool(self._buffer) or self._headers is not None

    @property
    def ends_with_connection(self) -> bool:
        return self._headers is not None and not self._chunked and self._left is None

    def answer(self) -> HttpAnswer:
        return HttpAnswer(self.status, bytes(self._body))

    def feed(self, now: float, data: bytes) -> bool:
        """Take bytes; True when the answer is complete. Raises ValueError for what is no HTTP."""
        self._buffer = self._buffer + data if self._buffer else data
        if self._headers is None and not self._take_head():
            return False
        if self._chunked:
            return self._take_chunks(now)
        body, self._buffer = self._buffer, b""
        self._take_body(now, body)
        if self._left is not None:
            self._left -= len(body)
        return self._left is not None and self._left <= 0

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ValueError("the head of the answer is too long")
            return False
        first, *lines = self._buffer[:end].split(b"\r\n")
        self._buffer = self._buffer[end + 4 :]
        if not first.startswith(b"HTTP/1."):
            raise ValueError(f"status line {first[:40]!r}")
        self.status = int(first.split(b" ", 2)[1])
        headers = dict(line.lower().split(b":", 1) for line in lines if b":" in line)
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        self._events = b"text/event-stream" in headers.get(b"content-type", b"")
        self.close = b"close" in headers.get(b"connection", b"")
        length = headers.get(b"content-length")
        self._left = 0 if self._chunked else int(length) if length is not None else None
        self._headers = headers
        return True

    def _take_chunks(self, now: float) -> bool:
        """`_left` counts what the current chunk still lacks, with its closing CRLF; 0 means a size line comes next."""
        while self._buffer:
            if self._left:
                part = self._buffer[: self._left]
                self._buffer = self._buffer[self._left :]
                content = max(0, self._left - 2)
                self._left -= len(part)
                self._take_body(now, part[:content])
                continue
            line, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                return False
            size = int(line.split(b";", 1)[0], 16)
            if size == 0:  # then trailers, of which we want none, and an empty line
                return rest.startswith(b"\r\n") or b"\r\n\r\n" in rest
            self._buffer, self._left = rest, size + 2
        return False

    def _take_body(self, now: float, data: bytes) -> None:
        if not self._events:
            if self.status == 200 or len(self._body) < MAX_ERROR_BYTES:
                self._body += data
            return
        *complete, self._event = (self._event + data).split(b"\n\n")
        for event in complete:
            _, found, content = (b"\n" + event).partition(b"\ndata: ")
            if found:
                self._on_event(now, content)
