"""uvicorn as we use it: on a socket bound by us, without signal handlers, lifespan, websockets or access log."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http import listening
from pagoda_gateway.http.protocol import ConnectionGuard, GuardedProtocol

LEAVE_S = 2.0  # from ending open requests to cutting connections
BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers. `listening` is set once connections are accepted."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before uvicorn closes the sockets, and without an await in between, so that nothing is accepted meanwhile.
        for listener in sockets or ():
            listening.end(listener)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_connections(self) -> None:
        """Abort connections that did not end in time."""
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            transport.abort()


def uvicorn_config(app: Any, config: GatewayConfig, guard: ConnectionGuard) -> uvicorn.Config:
    protocol: Any = functools.partial(GuardedProtocol, guard=guard)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `limits` reads them
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(config.keep_alive_s),
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + LEAVE_S),
    )
