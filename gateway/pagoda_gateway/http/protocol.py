"""Bounds what exists before a request: connections, the time and size of a head, clients that do not read.

uvicorn limits none of these. `GuardedProtocol` adds timers and counters to its httptools protocol; the connections of a
server share one `ConnectionGuard`. Verdicts about a complete head go to `LimitsMiddleware`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pagoda_gateway.clients import TrustedProxies, client_key
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.limits import SPARE, check_header_sizes, refusal
from pagoda_gateway.http.spare import SPARE_S, SparePlaces, asks_health
from pagoda_proto.errors import ErrorCode, PagodaError

MAX_REQUEST_LINE_BYTES = 8192
CLOCK_SLACK_S = 0.05  # an event loop's timers may be early by its clock's resolution

_errors_only = logging.getLogger(f"{__name__}.errors")
_errors_only.setLevel(logging.ERROR)  # no line for each malformed request of a stranger


class Kept(Protocol):
    """An idle keep-alive connection."""

    def let_go(self) -> None:
        """`leave`, and close."""


class ConnectionGuard:
    """Counts connections, in all and by client address; those of a trusted proxy have no limit per address here, as
    `limits` counts their requests per client. At a limit, the connection that has been idle longest is closed to make
    room. `now` is a clock that stands still while this process does."""

    def __init__(
        self, config: GatewayConfig, on_slow_client: Callable[[], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.on_slow_client = on_slow_client
        self.now = now
        self.spare = SparePlaces()
        self._proxies = TrustedProxies(config.forwarded_allow_ips)
        self._by_client: Counter[str] = Counter()
        self._total = 0
        self._kept: dict[Kept, str] = {}  # client addresses by connection, longest idle first

    def enter(self, peer: str) -> PagodaError | None:
        """Admit a connection, or say why not; an admitted one must `leave`."""
        config = self.config
        if self._total >= config.max_connections and not self._made_room():
            return PagodaError(ErrorCode.OVERLOADED, f"this server takes {config.max_connections} connections at once")
        client, limit = client_key(peer), config.max_connections_per_client
        if not self._proxies.trusts(peer) and self._by_client[client] >= limit and not self._made_room(client):
            hint = "a proxy, too, unless this server's --forwarded-allow-ips names it"
            return PagodaError(ErrorCode.OVERLOADED, f"one address may have {limit} connections at once ({hint})")
        self._total += 1
        self._by_client[client] += 1
        return None

    def rests(self, connection: Kept, peer: str) -> None:
        self._kept[connection] = client_key(peer)

    def works(self, connection: Kept) -> None:
        self._kept.pop(connection, None)

    def _made_room(self, client: str | None = None) -> bool:
        longest = next((each for each, address in self._kept.items() if client in (None, address)), None)
        if longest is None:
            return False
        self.works(longest)
        longest.let_go()
        return True

    def leave(self, peer: str) -> None:
        client = client_key(peer)
        self._total -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Each timer is armed at most once and cancelled when the connection is lost."""

    def __init__(self, *, guard: ConnectionGuard, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.logger = _errors_only
        self.asked = False
        self._guard = guard
        self._entered = False
        self._full: PagodaError | None = None  # why it has only a spare place
        self._in_head = False
        self._head_bytes = 0
        self._num_headers = 0
        self._header_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None

    # The life of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        error = self._guard.enter(self._client_address)
        if error is None:
            self._entered = True
        elif self._guard.spare.take(self, client_key(self._client_address)):
            self._full = error
        else:
            self._refuse(error)
            return
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        self._guard.works(self)
        self._guard.spare.leave(self)
        self._leave()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.body = bytearray()  # never read again, and a reference cycle may keep it in memory

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self._guard.leave(self._client_address)

    def let_go(self) -> None:
        self._leave()
        self.transport.close()

    def put_out(self) -> None:
        if self._full is not None:
            self._refuse(self._full)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._serving or self._in_head or self.transport.is_closing()):
            self._guard.rests(self, self._client_address)

    @property
    def _client_address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._slow_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._slow_timer = None

    def _refuse(self, error: PagodaError) -> None:
        """Answer outside of any request and close; in the middle of a response, only close."""
        if not self._serving and not self.transport.is_closing():
            status, headers, body = refusal(error, {})
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(PagodaError(ErrorCode.INVALID_ARGUMENT, msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Serve an unsupported upgrade as plain HTTP, without a line of log for each."""

    # The head of a request

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > self._guard.config.max_header_bytes + MAX_REQUEST_LINE_BYTES:
            self._refuse(PagodaError(ErrorCode.HEADERS_TOO_LARGE, "the request's head is too large"))
        elif self._in_head or not self._serving:
            # Even for bare line breaks between two requests: they stop uvicorn's keep-alive timer.
            self._arm_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._guard.works(self)
        self._in_head = True
        self._head_bytes = self._num_headers = self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Headers beyond the limits are counted but not kept."""
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        config = self._guard.config
        if self._num_headers <= config.max_headers and self._header_bytes <= config.max_header_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        problem = self._target_problem()
        if problem is not None:
            self.url = b"/"
        try:
            check_header_sizes(self._num_headers, self._header_bytes, self._guard.config)
        except PagodaError as error:
            problem = error
        if self._full is not None:
            self._on_spare_head(self._full, problem)
            return
        if problem is not None:
            self.scope["state"]["refusal"] = problem
        super().on_headers_complete()

    def _on_spare_head(self, full: PagodaError, problem: PagodaError | None) -> None:
        if self.asked or problem is not None or not asks_health(self.url, self.headers):
            self._refuse(full)
            return
        self.asked = True
        self.scope["state"][SPARE] = True
        self.headers.append((b"connection", b"close"))  # as if asked: uvicorn before 0.53 does not tell the client
        super().on_headers_complete()
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():  # refused by its head: nobody reads the body
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def _target_problem(self) -> PagodaError | None:
        """None for a path, or for a URL whose host is exactly that of the Host header."""
        if len(self.url) > MAX_REQUEST_LINE_BYTES:
            limit = MAX_REQUEST_LINE_BYTES
            return PagodaError(ErrorCode.HEADERS_TOO_LARGE, f"the request target must be at most {limit} bytes")
        if self.url.startswith(b"/"):
            return None
        scheme, _, rest = self.url.partition(b"://")
        authority, slash, _ = rest.partition(b"/")
        hosts = [value for name, value in self.headers if name == b"host"]
        if scheme.lower() not in (b"http", b"https") or not slash or hosts != [authority]:
            return PagodaError(ErrorCode.INVALID_ARGUMENT, "the request target does not match the Host header")
        return None

    def _arm_head_timer(self) -> None:
        if self._head_timer is None:
            limit_s = self._guard.config.header_timeout_s
            if self._full is not None:
                limit_s = min(limit_s, SPARE_S)
            self._head_timer = self.loop.call_later(limit_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._serving:
            self._arm_head_timer()
        elif self._full is not None:
            self._refuse(self._full)
        elif self._in_head:
            limit_s = self._guard.config.header_timeout_s
            message = f"the request's head was not complete after {limit_s:g} s"
            self._refuse(PagodaError(ErrorCode.REQUEST_TIMEOUT, message))
        else:
            self.transport.close()

    # A client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_slow_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def _arm_slow_timer(self) -> None:
        size, limit_s = self.transport.get_write_buffer_size(), self._guard.config.slow_client_timeout_s
        self._slow_timer = self.loop.call_later(limit_s, self._on_slow_client, size, self._guard.now())

    def _on_slow_client(self, size_before: int, armed_at: float) -> None:
        """Nothing is written while paused, so if the client has read anything, the buffer is smaller."""
        slept = self._guard.now() - armed_at < self._guard.config.slow_client_timeout_s - CLOCK_SLACK_S
        if slept or self.transport.get_write_buffer_size() < size_before:
            self._arm_slow_timer()
            return
        self._slow_timer = None
        self._guard.on_slow_client()
        self.transport.abort()
