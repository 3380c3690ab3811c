"""The whole app over a scripted engine, and clients with keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.routing import Route
from tests.gateway.fakes_engine import Gateway, Script, make_gateway

from pagoda_gateway.app import create_app
from pagoda_gateway.keys.api_key import ApiKey, NewKey

ADMIN = "key-of-the-admin"


class App:
    """`asgi` is the whole app; `admin` is a client with the admin's key."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.asgi: Any = create_app(gateway.served())
        self.admin = self.client(ADMIN)

    def client(self, key: str = "") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.asgi, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)

    def http_count(self, route: str, status: str) -> float:
        """The number of POST requests with this route and status."""
        labels = {"route": route, "method": "POST", "status": status}
        return self.gateway.metrics.registry.get_sample_value("pagoda_http_requests_total", labels) or 0.0

    async def new_key(self, **fields: Any) -> tuple[ApiKey, httpx.AsyncClient]:
        key, text = await self.gateway.context.keys.create(NewKey(**{"name": "n"} | fields))
        return key, self.client(text)

    def routes(self) -> Iterator[Route]:
        """All routes of the app, including those of its routers."""
        inner = self.asgi
        while not isinstance(inner, FastAPI):
            inner = inner._app
        for route in inner.routes:
            yield from ([route] if isinstance(route, Route) else route.original_router.routes)


@asynccontextmanager
async def running_app(root: Path, script: Script | None = None, **config: Any) -> AsyncIterator[App]:
    app = App(make_gateway(root, script, **{"admin_api_key": ADMIN} | config))
    yield app
    await app.gateway.context.gate.aclose()
    await app.gateway.context.store.aclose()
    app.gateway.context.pool.close()
