"""Assembles the app: routers and error handlers, wrapped in request ids, response counting and limits.

A request's id and API are determined before anything can refuse it, so every refusal carries the id and that API's
error format.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_gateway import request_ids
from pagoda_gateway.api import errors
from pagoda_gateway.api.error_body import set_shape
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.batches.batches import Batches
from pagoda_gateway.clients import identify_by
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.health import Health
from pagoda_gateway.http.failure_log import FailureLog
from pagoda_gateway.http.limits import LimitsMiddleware
from pagoda_gateway.http.multipart import MAX_FORM_BYTES
from pagoda_gateway.http.sse import keep_body_sender
from pagoda_gateway.keys.quota_headers import all_names as quota_names
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.routes import (  # in alphabetical order
    batches,
    files,
    generating,
    models,
    ops,
    page,
    responses,
    streams,
    tokenize,
    transcripts,
)  # fmt: skip
from pagoda_gateway.routes.accounts import keys, usage
from pagoda_gateway.routes.described import Document
from pagoda_gateway.routes.pooling import embeddings, ranking
from pagoda_gateway.routes.unread import refusing_unread
from pagoda_gateway.tickets.naming import HEADERS as REPEATED_HEADERS
from pagoda_gateway.tickets.tickets import Tickets
from pagoda_gateway.version import VERSION

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Served(NamedTuple):
    """What the routes work with. The caller starts the engine client, `health`, `background` and the batch runner,
    which learns of changes through `batches`."""

    ctx: GatewayContext
    health: Health
    metrics: GatewayMetrics
    background: BackgroundResponses
    batches: Batches
    tickets: Tickets


def create_app(served: Served) -> ASGIApp:
    """Build the whole gateway as one ASGI app, which owns no task."""
    ctx, health, metrics = served.ctx, served.health, served.metrics
    routers = routers_of(served)
    templates = frozenset(route_templates(routers))
    metrics.know_routes(templates)
    failures = FailureLog(templates, on=ctx.config.log_requests)
    identify = identify_by(ctx.config.forwarded_allow_ips, ctx.gate)
    uploads = {files.PATH: ctx.config.max_file_bytes + MAX_FORM_BYTES}
    limited = LimitsMiddleware(
        api_of(routers), ctx.config, ctx.memory, identify, ctx.quotas, uploads, refusing_unread(ctx)
    )
    return Edge(_for_pages(limited, ctx.config.allowed_origins), metrics, failures, lambda: health.draining)


def routers_of(served: Served) -> list[APIRouter]:
    """Return the routers of all endpoints."""
    ctx, health, metrics, background, batch_store, tickets = served
    routers = [
        module.router(ctx) for module in (embeddings, ranking, models, tokenize, files, keys, usage, transcripts)
    ]
    routers.append(generating.router(ctx, tickets))
    routers.append(responses.router(ctx, background, tickets))
    routers.append(streams.router(ctx, tickets, responses.STREAMING))
    routers.append(batches.router(ctx, batch_store))
    routers.append(ops.router(ctx, health, metrics))
    if ctx.config.page:
        routers.append(page.router())
    return routers


def api_of(routers: list[APIRouter]) -> FastAPI:
    """Build routes and error handlers only: no limits, no metrics, no authentication."""
    # FastAPI's own documentation pages load scripts from a CDN; `ops` serves a page that loads nothing. FastAPI would
    # build /openapi.json on the event loop.
    api = FastAPI(
        title="Pagoda", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    api.add_route("/openapi.json", Document(api).answer, include_in_schema=False)
    errors.install(api)
    for router in routers:
        api.include_router(router)
    return api


def _for_pages(app: ASGIApp, allowed_origins: str) -> ASGIApp:
    """Let pages of these origins send requests and read refusals too. They need API keys like any client: there are
    no cookies."""
    if not allowed_origins:
        return app
    exposed = (
        "x-request-id",
        "openai-processing-ms",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
        *REPEATED_HEADERS,
        *quota_names(),
    )
    origins, methods = allowed_origins.split(","), ("GET", "HEAD", "POST", "DELETE")
    cors = CORSMiddleware(app, origins, methods, allow_headers=("*",), expose_headers=exposed)

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        refused = "refusal" in scope.get("state", {})  # `http.protocol` refused it already: `app` answers
        await (app if refused else cors)(scope, receive, send)

    return either


def route_templates(routers: list[APIRouter]) -> Iterator[str]:
    for router in routers:
        for route in router.routes:
            path = getattr(route, "path", None)
            if path:
                yield path


class Edge:
    """Gives every response a request id, counts it, logs error responses, and closes connections while the gateway
    drains."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, failures: FailureLog, draining: Callable[[], bool]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._failures = failures
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_at = time.monotonic()
        status: int | None = None
        request_id = request_id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        set_shape(scope, generating.ERROR_SHAPES)
        keep_body_sender(scope, send)

        def marked_send(message: Message) -> object:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._headers(request_id, begun_at)]
            return send(message)

        try:
            with request_ids.serving(request_id):
                await self._app(scope, receive, marked_send)  # type: ignore[arg-type]
        finally:
            route = getattr(scope.get("route"), "path", None) or scope["path"]  # the raw path if nothing was routed
            kind = "disconnected" if status is None else f"{status // 100}xx"
            self._metrics.http(route, scope["method"], kind, time.monotonic() - begun_at)
            self._failures.answered(scope, status, request_id, route)

    def _headers(self, request_id: str, begun_at: float) -> Iterator[tuple[bytes, bytes]]:
        yield b"x-request-id", request_id.encode()
        yield b"request-id", request_id.encode()  # the name Anthropic's clients look for
        yield b"openai-processing-ms", str(int(1000 * (time.monotonic() - begun_at))).encode()
        if self._draining():
            yield b"connection", b"close"


def request_id_of(scope: Scope) -> str:
    """Return the client's own id if it is harmless, otherwise a new one. It only lets the client recognise its request;
    internally, requests have other ids."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return str(text)
    return f"req-{uuid.uuid4().hex}"
