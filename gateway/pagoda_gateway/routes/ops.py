"""Endpoints for operators and probes: liveness, readiness, startup, version, load, and the API's description."""

from __future__ import annotations

from functools import partial
from importlib import resources

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST

from pagoda_gateway.api.answer_schemas import Live, LoadAnswer, Ready, RequestSpent, StackAnswer, Startup, Version
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.health import Health
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.routes.body import caller_of
from pagoda_gateway.routes.described import endpoint
from pagoda_gateway.version import VERSION
from pagoda_proto.errors import ErrorCode, PagodaError

DOCS_CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; base-uri 'none'"


def router(ctx: GatewayContext, health: Health, metrics: GatewayMetrics) -> APIRouter:
    routes = APIRouter()
    _add_health(routes, health)
    _add_reports(routes, ctx, health, metrics)
    _add_docs(routes)
    _add_heads(routes)
    return routes


def _add_health(routes: APIRouter, health: Health) -> None:
    get = partial(endpoint, routes, tags=["health"])

    @get("/health/live", "The event loop answers and its long-lived tasks run", Live, unavailable=Live)
    async def live() -> Response:
        dead = health.dead_tasks()
        return JSONResponse({"live": not dead, "dead": dead}, 503 if dead else 200)

    @get("/health/ready", "Requests would be answered: tokens came lately", Ready, unavailable=Ready)
    async def ready() -> Response:
        problems = health.problems()
        return JSONResponse({"ready": not problems, "problems": problems}, 503 if problems else 200)

    @get("/health/startup", "Whether it was ready once, and how far it is", Startup, unavailable=Startup)
    async def startup() -> Response:
        content = {"started": health.started, "phase": health.phase, "problems": health.problems()}
        return JSONResponse(content, 200 if health.started else 503)

    @get("/health", "As /health/ready, with an empty body", None, unavailable=None)
    @get("/ping", "As /health", None, unavailable=None)
    async def short() -> Response:
        return Response(status_code=503 if health.problems() else 200)


def _add_reports(routes: APIRouter, ctx: GatewayContext, health: Health, metrics: GatewayMetrics) -> None:
    get = partial(endpoint, routes, tags=["operation"])

    @get("/version", "The version of this gateway", Version, unavailable=None)
    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    @get("/metrics", "Prometheus metrics of this gateway", None, unavailable=None)
    async def prometheus() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @get("/stack", "Workers, load, and the caller's own last requests", StackAnswer, unavailable=None)
    async def stack(request: Request) -> Response:
        caller = caller_of(request)
        content = {
            "version": VERSION,
            "models": [model.name for model in ctx.catalogue.of(caller)],
            "problems": health.problems(),
            "phase": health.phase,
            "num_open": metrics.num_open(),
            "load": ctx.engine.load,
            "report": await ctx.engine.report(),
            "requests": ctx.engine.recent.of(caller.tenant),
        }
        return JSONResponse(msgspec.to_builtins(content), headers={"cache-control": "no-store"})

    @get("/v1/requests/{request_id}", "Where the time of one of the caller's last requests went", RequestSpent)
    async def spent(request: Request, request_id: str) -> Response:
        found = ctx.engine.recent.find(caller_of(request).tenant, request_id)
        if found is None:
            message = f"no request {request_id[:64]!a} of yours ended here lately"
            raise PagodaError(ErrorCode.NOT_FOUND, message)
        content = msgspec.to_builtins(found) | {"object": "request", "waits_s": found.spent_s()}
        return JSONResponse(content, headers={"cache-control": "no-store"})

    @get("/load", "Open requests here, and the engine core's own report", LoadAnswer, unavailable=None)
    async def load() -> Response:
        content = {"server_load": metrics.num_open(), "engine": msgspec.to_builtins(ctx.engine.load)}
        return JSONResponse(content)


def _add_heads(routes: APIRouter) -> None:
    """Add HEAD for probes: the same answer, of which the server omits the body."""
    for route in list(routes.routes):
        if isinstance(route, APIRoute):
            routes.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def _add_docs(routes: APIRouter) -> None:
    static = resources.files("pagoda_gateway") / "static"
    page, script = ((static / name).read_text("utf-8") for name in ("docs.html", "docs.js"))

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": DOCS_CSP})

    @routes.get("/docs/docs.js", include_in_schema=False)
    async def docs_script() -> Response:
        return Response(script, media_type="text/javascript")
