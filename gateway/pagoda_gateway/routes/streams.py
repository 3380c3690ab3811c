"""GET /v1/streams/{id}: resumes a stream with an Idempotency-Key, at any gateway that shares its store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from pagoda_gateway.api.error_body import set_shape_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.http.sse import EventStream
from pagoda_gateway.routes.body import caller_of, json_response
from pagoda_gateway.routes.described import endpoint
from pagoda_gateway.store.tickets import not_found
from pagoda_gateway.tickets.naming import STREAMS, reader_of
from pagoda_gateway.tickets.tickets import Tickets

ONE = f"{STREAMS}/{{stream_id}}"


class DeletedStream(BaseModel):
    id: str
    object: str
    deleted: bool


def router(ctx: GatewayContext, tickets: Tickets, dialects: Mapping[str, Dialect[Any]]) -> APIRouter:
    """`dialects` by path."""
    routes = APIRouter(tags=["streams"])

    @endpoint(routes, ONE, "Go on with a stream behind its Last-Event-ID", None)
    async def follow(request: Request, stream_id: str) -> Response:
        caller = caller_of(request)
        found, reader = await tickets.find(stream_id, caller.tenant), reader_of(request)
        dialect = dialects.get(found.ticket.path)
        if dialect is None:
            raise not_found(stream_id)
        set_shape_of(request.scope, dialect.error)

        async def events() -> AsyncGenerator[bytes, None]:
            async with tickets.reading(
                found, None, dialect, lambda model: ctx.charge_for(caller, model), reader
            ) as writer:
                async for data in writer.events():
                    yield data

        return EventStream(events(), ctx.config.ping_interval_s, dialect.ping(ids=True))

    @endpoint(routes, ONE, "End a stream, and forget it", DeletedStream, method="DELETE")
    async def delete(request: Request, stream_id: str) -> Response:
        await tickets.forget(await tickets.find(stream_id, caller_of(request).tenant))
        return json_response({"id": stream_id, "object": "stream", "deleted": True})

    return routes
