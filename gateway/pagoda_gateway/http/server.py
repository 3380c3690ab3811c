"""uvicorn as we use it: on a socket bound by us, without signal handlers, lifespan, websockets or access log."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import math
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.protocol import ConnectionGuard, GuardedProtocol

SEND_BUFFER_BYTES = 256 * 1024  # what the kernel holds for a client that does not read
RECEIVE_BUFFER_BYTES = 256 * 1024  # .. and for one that is not read from
LEAVE_S = 2.0  # from ending what is still open to cutting connections
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def is_private(listener: socket.socket) -> bool:
    """Whether nobody but this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn's server, less its signal handlers. `listening` is set once connections are accepted."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_connections(self) -> None:
        """What did not end in time does not outlive the server."""
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
