"""Admits a request to its route only once it is known to be small, complete, uncompressed and on a normal path.

Pure ASGI, around the whole app. First the caller is identified, and checked against permissions and limits, from the
head alone; then the body is read, counted while it streams, under one deadline. Routes get it whole, with the `caller`
in `scope["state"]`. An upload path gets its body as it arrives, counted likewise, under a deadline that is extended by
the bytes received.

Bytes before a request exists (headers, connections, slow readers) are the business of `protocol`, which leaves its
verdict in `scope["state"]["refusal"]` so that responses stay in order.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_gateway.api.error_body import shape_of
from pagoda_gateway.api.errors import error_response
from pagoda_gateway.clients import Caller, Identify
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.memory import COUNTED_ABOVE_BYTES, Holding, MemoryBudget
from pagoda_gateway.http.upload_rate import Upload, UploadRate
from pagoda_gateway.keys.quota import Quota, Quotas
from pagoda_proto.errors import ErrorCode, PagodaError

LINGER_S = 1.0
LINGER_BYTES = 64 * 1024 * 1024
LEAST_BYTES_PER_S = 64 * 1024  # of an upload, on average
SPARE = "spare"  # in a request's state: it arrived on a connection beyond the limits
NO_UPLOADS: Mapping[str, int] = {}
Unread = Callable[[Scope], PagodaError | None]
_NOT_NORMAL = re.compile(rb"//|\\|(^|/)\.{1,2}(/|$)|%(2f|5c|2e|00)|[^\x21-\x7e]", re.IGNORECASE)


def refusal(error: PagodaError, scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of a refusal, after which the connection closes."""
    response = error_response(error, scope)
    return response.status_code, [*response.raw_headers, (b"connection", b"close")], bytes(response.body)


class LimitsMiddleware:
    def __init__(  # noqa: PLR0913 - all that is known before a body is read
        self,
        app: ASGIApp,
        config: GatewayConfig,
        memory: MemoryBudget,
        identify: Identify,
        quotas: Quotas,
        uploads: Mapping[str, int] = NO_UPLOADS,
        unread: Unread = lambda scope: None,
    ) -> None:
        """`uploads`: paths whose POST bodies are streamed, with the most bytes of each. `unread` says why a request of
        a known caller is refused without reading its body."""
        self._app = app
        self._uploads = uploads
        self._config = config
        self._memory = memory
        self._identify = identify
        self._quotas = quotas
        self._unread = unread
        self._open_by_client: Counter[str] = Counter()
        self._rate = UploadRate(config.max_upload_bytes_per_second)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003, "reason": "no websockets here"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = await self._identify(scope)
        except PagodaError as error:
            peer = scope.get("client") or ("", 0)
            await _refuse(error, scope, Upload(receive, self._rate, peer[0], time.monotonic), send)
            return
        client = caller.key
        holding = self._memory.holding(client)
        scope.setdefault("state", {}).update(caller=caller, memory=holding)
        self._open_by_client[client] += 1
        quota = self._quotas.of(caller.tenant, caller.grant.limits)
        try:
            await self._serve_within(quota, scope, receive, _telling(quota, scope, send))
        finally:
            holding.release()
            self._open_by_client[client] -= 1
            if not self._open_by_client[client]:
                del self._open_by_client[client]

    async def _serve_within(self, quota: Quota, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope["state"]["caller"]
        upload = Upload(receive, self._rate, caller.key, time.monotonic)
        limit = self._uploads.get(scope["path"]) if scope.get("method") == "POST" else None
        with ExitStack() as request:
            try:
                self._check_head(scope, limit or self._config.max_body_bytes)
                caller.grant.check_path(scope["path"])
                if SPARE not in scope["state"]:  # spare ones are counted as connections
                    self._check_client(caller.key)
                request.enter_context(quota.request())
            except PagodaError as error:
                await _refuse(error, scope, upload, send)
                return
            if (full := self._unread(scope)) is not None:
                await (_refuse_and_keep(full, scope, send) if _is_short(scope) else _refuse(full, scope, upload, send))
                return
            await self._serve(scope, upload, receive, send, limit)

    async def _serve(self, scope: Scope, upload: Upload, receive: Receive, send: Send, limit: int | None) -> None:
        """`limit`: most bytes of an upload; None for a body to be read whole."""
        holding: Holding = scope["state"]["memory"]
        try:
            if limit is not None:
                await self._serve_upload(scope, upload, receive, send, limit)
                return
            body = await self._read_body(upload, holding)
        except PagodaError as error:
            error.__traceback__ = None  # its frames hold the body read so far
            holding.release()
            await _refuse(error, scope, upload, send)
            return
        if body is not None:
            replay = _replay(body, receive)
            del body
            await self._app(scope, replay, send)

    async def _serve_upload(self, scope: Scope, upload: Upload, receive: Receive, send: Send, limit: int) -> None:
        """If the app leaves part of the body unread, read on a little before its answer ends: see `_refuse`."""
        body = StreamedBody(upload, receive, limit, self._config.body_timeout_s)

        async def patient_send(message: Message) -> None:
            if body.complete:
                await send(message)
            elif message["type"] == "http.response.start":
                await send({**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]})
            else:
                await send({**message, "more_body": True})
                if not message.get("more_body", False):
                    await _linger(upload)
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, body.receive, patient_send)

    def _check_client(self, client: str) -> None:
        limit = self._config.max_connections_per_client
        if self._open_by_client[client] > limit:
            raise PagodaError(ErrorCode.OVERLOADED, f"one address may have {limit} requests open at once")

    def _check_head(self, scope: Scope, max_body_bytes: int) -> None:
        """Raises PagodaError for a head that is not acceptable."""
        found: PagodaError | None = scope.get("state", {}).get("refusal")
        if found is not None:
            raise found
        headers = scope["headers"]
        check_header_sizes(len(headers), sum(len(k) + len(v) for k, v in headers), self._config)
        if not is_normal_path(scope.get("raw_path") or scope["path"].encode(), scope["path"]):
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, "the request path is not in its normal form")
        for name, value in headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise PagodaError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "compressed request bodies are not accepted")
            if name == b"content-length" and value.isdigit() and int(value) > max_body_bytes:
                raise _too_large(max_body_bytes)

    async def _read_body(self, upload: Upload, holding: Holding) -> bytes | None:
        """The whole body, or None if the client left meanwhile. Throttling time does not count against its deadline."""
        chunks: list[bytes] = []
        limit_s = self._config.body_timeout_s
        deadline_at = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(deadline_at) as deadline:
                while True:
                    message = await upload.next()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    if upload.num_bytes > self._config.max_body_bytes:
                        raise _too_large(self._config.max_body_bytes)
                    holding.grow_to(upload.num_bytes)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
                    deadline_at += upload.owed_s
                    deadline.reschedule(deadline_at)
                    await asyncio.sleep(upload.owed_s)
        except TimeoutError:
            raise _too_slow(f"was not complete after {limit_s:g} s") from None


class StreamedBody:
    """An upload's body as its route receives it. It may take `timeout_s`, and longer the more of it has arrived."""

    def __init__(self, upload: Upload, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self.complete = False
        self._upload = upload
        self._receive = receive
        self._max_bytes = max_bytes
        self._deadline_at = asyncio.get_running_loop().time() + timeout_s

    async def receive(self) -> Message:
        """Raises PagodaError for a body that is too large or too slow."""
        if self.complete:
            return await self._receive()
        await asyncio.sleep(self._upload.owed_s)
        self._deadline_at += self._upload.owed_s
        before = self._upload.num_bytes
        try:
            async with asyncio.timeout_at(self._deadline_at):
                message = await self._upload.next()
        except TimeoutError:
            raise _too_slow(f"came at less than {LEAST_BYTES_PER_S} bytes/s") from None
        if self._upload.num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._deadline_at += (self._upload.num_bytes - before) / LEAST_BYTES_PER_S
        self.complete = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message


def _too_large(max_bytes: int) -> PagodaError:
    return PagodaError(ErrorCode.REQUEST_TOO_LARGE, f"the request body must be at most {max_bytes} bytes")


def _too_slow(how: str) -> PagodaError:
    return PagodaError(ErrorCode.REQUEST_TIMEOUT, f"the request body {how}")


def _telling(quota: Quota, scope: Scope, send: Send) -> Send:
    """Wrap `send` so that every response says what is left of the quota."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start" and (left := quota.left()):
            told = shape_of(scope).quota_headers(left, time.time())
            message = {**message, "headers": [*message.get("headers", ()), *told]}
        await send(message)

    return tell


def check_header_sizes(count: int, num_bytes: int, config: GatewayConfig) -> None:
    """Raises PagodaError HEADERS_TOO_LARGE naming the limit."""
    if count > config.max_headers:
        raise PagodaError(ErrorCode.HEADERS_TOO_LARGE, f"at most {config.max_headers} headers are allowed")
    if num_bytes > config.max_header_bytes:
        limit = config.max_header_bytes
        raise PagodaError(ErrorCode.HEADERS_TOO_LARGE, f"headers must be at most {limit} bytes together")


def is_normal_path(raw: bytes, decoded: str) -> bool:
    """Whether every proxy and server would read the same path in it."""
    if not raw.startswith(b"/") or _NOT_NORMAL.search(raw):
        return False
    return "//" not in decoded and all(c.isprintable() for c in decoded)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body as one message, and afterwards only reports the client's disconnect."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _refuse(error: PagodaError, scope: Scope, upload: Upload, send: Send) -> None:
    """Answer, then read on a little: closing with unread bytes resets the connection, and the answer is lost."""
    status, headers, body = refusal(error, scope)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if error.code is not ErrorCode.REQUEST_TIMEOUT:
        await _linger(upload)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _refuse_and_keep(error: PagodaError, scope: Scope, send: Send) -> None:
    """Refuse and keep the connection: under overload, reconnecting costs more than skipping short bodies."""
    await error_response(error, scope)(scope, _nothing, send)


async def _nothing() -> Message:
    raise AssertionError("nobody reads it")


def _is_short(scope: Scope) -> bool:
    """Whether the body is short enough to skip, and is sent without waiting for a 100-continue."""
    said = dict(scope["headers"])
    length = said.get(b"content-length", b"")
    return length.isdigit() and int(length) <= COUNTED_ABOVE_BYTES and b"expect" not in said


async def _linger(upload: Upload) -> None:
    most_bytes = upload.num_bytes + LINGER_BYTES
    more = True
    try:
        async with asyncio.timeout(LINGER_S):
            while more and upload.num_bytes < most_bytes:
                await asyncio.sleep(upload.owed_s)
                more = (await upload.read()).get("more_body", False)
    except TimeoutError:
        return
