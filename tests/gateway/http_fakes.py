"""A real uvicorn with our protocol around any app, and a raw client that sees every byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from pagoda_gateway.clients import Caller, Identify, TrustedProxies
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.limits import NO_UPLOADS, LimitsMiddleware
from pagoda_gateway.http.listening import bind
from pagoda_gateway.http.memory import MemoryBudget
from pagoda_gateway.http.protocol import ConnectionGuard
from pagoda_gateway.http.server import HttpServer, uvicorn_config
from pagoda_gateway.keys.quota import Quotas


def limited(
    app: ASGIApp, config: GatewayConfig, identify: Identify | None = None, uploads: Mapping[str, int] = NO_UPLOADS
) -> LimitsMiddleware:
    """The app behind the limits; without `identify`, callers are identified by their address alone."""
    proxies = TrustedProxies(config.forwarded_allow_ips)

    async def by_address(scope: Any) -> Caller:
        return proxies.caller_of(scope)

    memory = MemoryBudget(config.max_held_bytes)
    return LimitsMiddleware(app, config, memory, identify or by_address, Quotas(), uploads)


@dataclass
class Running:
    port: int
    server: HttpServer
    slow: list[bool] = field(default_factory=list)


@asynccontextmanager
async def running_http(
    app: ASGIApp, config: GatewayConfig, now: Callable[[], float] = time.monotonic
) -> AsyncIterator[Running]:
    listener = bind("127.0.0.1", 0)
    slow: list[bool] = []
    server = HttpServer(uvicorn_config(app, config, ConnectionGuard(config, lambda: slow.append(True), now)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.listening.wait()
    try:
        yield Running(listener.getsockname()[1], server, slow)
    finally:
        server.cut_connections()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for accepting in server.servers:
            accepting.close()
        listener.close()


async def talk(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read until the server closes: status, headers (lower case), body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return parse(await reader.read())
    finally:
        writer.close()


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def error_code(body: bytes) -> str:
    """The code of an OpenAI-shaped error; checks its shape."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])
