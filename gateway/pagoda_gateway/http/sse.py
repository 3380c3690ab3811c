"""Server-sent events: pings during silence, detection of lost clients, and errors reported in the stream.

Nothing is sent before the first event, so an early failure has its proper status; after `ping_interval_s` of silence
(0: never) the stream opens anyway. A failure in mid-stream becomes one `error` event, and no `[DONE]` follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagoda_gateway.api.encoding import PING, event
from pagoda_gateway.api.error_body import shape_of
from pagoda_gateway.api.errors import error_response, internal, request_id_of
from pagoda_proto.errors import ErrorCode, PagodaError

logger = logging.getLogger(__name__)

NO_HEADERS: Mapping[str, str] = {}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def keep_body_sender(scope: Scope, send: Send) -> None:
    """Remember `send` for bodies: the middleware between it and a stream only looks at a response's head."""
    scope.setdefault("state", {})["send_body"] = send


def body_sender(scope: Scope, send: Send) -> Send:
    """The `send` kept for this request, otherwise the one given."""
    kept: Send = scope.get("state", {}).get("send_body", send)
    return kept


class ClientGone(PagodaError):
    """The client disconnected; nobody will read an answer."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.CANCELLED, "the client left")


@contextlib.asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client leaves.

    Raises:
        ClientGone: it left; the cancellation has released what the block held.
    """
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task is not None and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Streams what `events` yields: ready-made bytes of one or more events each."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ping_interval_s: float,
        ping: bytes = PING,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._head = _HEADERS + [(name.encode(), value.encode()) for name, value in headers.items()]
        self._events = events
        self._ping_interval_s = ping_interval_s
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream in a separate task, so that an event wakes this stream and not all middleware around the request."""
        await asyncio.create_task(self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, body_sender(scope, send), self._ping, self._head)
        pinger = asyncio.create_task(writer.keep_pinging(self._ping_interval_s)) if self._ping_interval_s else None
        try:
            async with until_disconnect(receive), contextlib.aclosing(self._events) as events:
                async for data in events:
                    await writer.write(data)
            await writer.end()
        except ClientGone:
            logger.debug("client left before its stream ended")
        except Exception as error:  # noqa: BLE001 - the outermost loop of a stream: it must have an ending
            failure = error if isinstance(error, PagodaError) else internal(error, scope)
            shape, response = shape_of(scope), error_response(failure, scope)
            if not await writer.end_with(event(shape.body(failure, request_id_of(scope)), shape.event)):
                await response(scope, receive, send)
        finally:
            if pinger is not None:
                pinger.cancel()


class _Writer:
    """Serialises the writes of the stream and of the pinger. `send_body` sends everything but the head."""

    def __init__(self, send: Send, send_body: Send, ping: bytes, head: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._send_body = send_body
        self._ping = ping
        self._head = head
        self._lock = asyncio.Lock()
        self._open = False
        self._ended = False
        self._wrote = False  # since the pinger last looked

    async def write(self, data: bytes, more: bool = True) -> None:
        async with self._lock:
            self._wrote = True
            if not self._open:
                self._open = True
                await self._send({"type": "http.response.start", "status": 200, "headers": list(self._head)})
            await self._send_body({"type": "http.response.body", "body": data, "more_body": more})
            self._ended = not more

    async def end(self) -> None:
        await self.write(b"", more=False)

    async def end_with(self, last: bytes) -> bool:
        """Send a last event. False, and no more pings, if nothing was sent yet: a proper response is still possible."""
        async with self._lock:
            if not self._open:
                self._ended = True
                return False
        await self.write(last, more=False)
        return True

    async def keep_pinging(self, interval_s: float) -> None:
        while not self._ended:
            self._wrote = False
            await asyncio.sleep(interval_s)
            if not (self._wrote or self._ended):
                await self.write(self._ping)
