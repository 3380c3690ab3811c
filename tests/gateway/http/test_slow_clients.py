"""Slowness is measured on the gateway's clock: while the gateway itself is suspended, no client counts as slow."""

from __future__ import annotations

import asyncio
import socket
import time

from starlette.types import Receive, Scope, Send
from tests.gateway.http_fakes import running_http

from pagoda_gateway.config import GatewayConfig


async def test_the_time_that_the_gateway_slept_is_not_the_clients() -> None:
    slept, gone = True, asyncio.Event()
    still = time.monotonic()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            if not http.server.server_state.connections:
                gone.set()

    config = GatewayConfig(slow_client_timeout_s=0.2)
    async with running_http(app, config, lambda: still if slept else time.monotonic()) as http:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", http.port))
            await loop.sock_sendall(sock, b"GET /stream HTTP/1.1\r\nhost: h\r\n\r\n")
            await asyncio.sleep(4 * config.slow_client_timeout_s)
            assert http.slow == []
            slept = False
            async with asyncio.timeout(20):
                await gone.wait()
            assert http.slow == [True]
