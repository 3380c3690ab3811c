"""POST /v1/responses, and operations on a response afterwards: retrieve, follow, cancel, delete."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.encoding import encoded
from pagoda_gateway.api.responses_answers import DeletedResponse, InputItems, ResponseAnswer
from pagoda_gateway.api.responses_schemas import ItemsQuery, ResponsesRequest, RetrieveQuery
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.responses import RESPONSES
from pagoda_gateway.http.sse import EventStream
from pagoda_gateway.routes.body import caller_of, json_response, query_of, read_body, while_connected
from pagoda_gateway.routes.described import JSON, endpoint
from pagoda_gateway.routes.generating import DIALECTS, job_maker, respond
from pagoda_gateway.store.response_logs import not_found, to_its_end
from pagoda_gateway.store.tickets import Found
from pagoda_gateway.tickets.naming import Named, Naming, Opened, headers_of
from pagoda_gateway.tickets.tickets import NewJob, Tickets
from pagoda_proto.errors import InvalidParams, PagodaError, Problem

PATH = RESPONSES.path
STREAMING = {dialect.path: dialect for dialect in (*DIALECTS, RESPONSES)}
ONE = f"{PATH}/{{response_id}}"


def router(ctx: GatewayContext, background: BackgroundResponses, tickets: Tickets) -> APIRouter:
    routes = APIRouter(tags=["responses"])
    _add_create(routes, ctx, background, tickets)
    _add_retrieve(routes, ctx, background)
    _add_cancel(routes, ctx, background)
    _add_delete(routes, ctx, background, tickets)
    _add_input_items(routes, ctx)
    return routes


def _add_create(routes: APIRouter, ctx: GatewayContext, background: BackgroundResponses, tickets: Tickets) -> None:
    @endpoint(routes, PATH, RESPONSES.summary, ResponseAnswer, request=ResponsesRequest, name=RESPONSES.name)
    async def create(request: Request) -> Response:
        naming, caller = Naming(request), caller_of(request)
        bodies = [await read_body(ctx, request, ResponsesRequest, naming.seen)]
        named, stream = naming.named(bodies[0], caller.tenant), bodies[0].stream
        if not bodies[0].background:
            return await respond(ctx, tickets, RESPONSES, request, bodies, named)
        begin = _begin_once(background, tickets, named, job_maker(ctx, RESPONSES, request, bodies))
        name, response, headers = await while_connected(request, begin)
        if stream:
            follow = background.follow(name, caller.tenant, 0)
            return EventStream(follow, ctx.config.ping_interval_s, headers=headers)
        response = response or await _response(ctx, background, name, caller)
        return Response(response, media_type=JSON, headers=dict(headers))


async def _begin_once(
    background: BackgroundResponses, tickets: Tickets, named: Named | None, new_job: NewJob
) -> tuple[str, bytes, Mapping[str, str]]:
    """Begin a background response, unless its ticket has begun it before. Returns its id, its initial JSON (b"" if it
    began before), and the headers about its ticket."""
    opened = Opened(None, None)
    while named is not None:
        opened = await tickets.open(named, new_job)
        if not opened.repeated or opened.found is None:
            break
        if await background.is_kept(opened.found.ticket.job_id, named.owner):
            return opened.found.ticket.job_id, b"", headers_of(named, opened)
        await tickets.let_go(opened.found)
    job = opened.job or await new_job()
    try:
        response = await background.begin(job)
    except BaseException:
        if opened.found is not None:
            with suppress(PagodaError):
                await to_its_end(_forget_unless_begun(background, tickets, opened.found))
        raise
    return job.id, response, headers_of(named, opened)


async def _forget_unless_begun(background: BackgroundResponses, tickets: Tickets, found: Found) -> None:
    """Forget the ticket if no response is kept. Otherwise, or if the store does not say, it stays: a repeated request
    gets the response if it runs, and after a while begins it anew if not."""
    if not await background.is_kept(found.ticket.job_id, found.owner):
        await tickets.forget(found)


def _add_retrieve(routes: APIRouter, ctx: GatewayContext, background: BackgroundResponses) -> None:
    @endpoint(routes, ONE, "A response, or with `stream` its events", ResponseAnswer)
    async def retrieve(request: Request, response_id: str) -> Response:
        caller, asked = caller_of(request), query_of(request, RetrieveQuery)
        if not asked.stream:
            return Response(await _response(ctx, background, response_id, caller), media_type=JSON)
        _, kept = await ctx.responses.find(response_id, caller.tenant)
        if not kept.streamed:
            message = "only a response that was made with background: true and stream: true can be streamed again"
            raise InvalidParams([Problem("stream", message)])
        start = 0 if asked.starting_after is None else asked.starting_after + 1
        return EventStream(background.follow(response_id, caller.tenant, start), ctx.config.ping_interval_s)


def _add_cancel(routes: APIRouter, ctx: GatewayContext, background: BackgroundResponses) -> None:
    @endpoint(routes, f"{ONE}/cancel", "End a response that runs in the background", ResponseAnswer, method="POST")
    async def cancel(request: Request, response_id: str) -> Response:
        caller, kept = caller_of(request), ctx.responses
        if not (await kept.find(response_id, caller.tenant))[1].background:
            raise InvalidParams([Problem("response_id", "only a response in the background can be cancelled")])
        await kept.cancel(response_id, caller.tenant)
        await background.cancelled(response_id)
        return Response(await _response(ctx, background, response_id, caller), media_type=JSON)


def _add_delete(routes: APIRouter, ctx: GatewayContext, background: BackgroundResponses, tickets: Tickets) -> None:
    @endpoint(routes, ONE, "Forget a response", DeletedResponse, method="DELETE")
    async def delete(request: Request, response_id: str) -> Response:
        caller, kept = caller_of(request), ctx.responses
        await kept.cancel(response_id, caller.tenant)
        await background.cancelled(response_id)
        await tickets.forget_job(response_id, caller.tenant)  # before the deletion: it could store the response again
        await kept.delete(response_id, caller.tenant)
        return json_response({"id": response_id, "object": "response", "deleted": True})


def _add_input_items(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, f"{ONE}/input_items", "What a response was asked, the conversation before it too", InputItems)
    async def input_items(request: Request, response_id: str) -> Response:
        asked, kept = query_of(request, ItemsQuery), ctx.responses
        _, found = await kept.find(response_id, caller_of(request).tenant)
        items = _listed(await kept.items(response_id, found))
        items = items if asked.order == "asc" else items[::-1]
        names = [item["id"] for item in items]
        if asked.after is not None and asked.after not in names:
            raise InvalidParams([Problem("after", f"no item of this response is called {asked.after[:64]!a}")])
        start = 0 if asked.after is None else names.index(asked.after) + 1
        page = items[start : start + asked.limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_response({"object": "list", "data": page, **ends, "has_more": start + asked.limit < len(items)})


async def _response(ctx: GatewayContext, background: BackgroundResponses, name: str, caller: Caller) -> bytes:
    """The response as it is now."""
    for _ in range(2):  # again if it ended meanwhile
        _, kept = await ctx.responses.find(name, caller.tenant)
        if kept.ended:
            return await ctx.responses.response(name, kept)
        if (here := background.snapshot(name)) is not None:
            return here
        if (begun := await ctx.responses.begun(name, kept)) is not None:
            return encoded(begun)
    raise not_found(name)


def _listed(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every item a unique id, by its place if it has none, and its content in parts."""
    found: dict[str, dict[str, Any]] = {}
    for i, item in enumerate(items):
        content = item.get("content")
        parts = {"content": [{"type": "input_text", "text": content}]} if isinstance(content, str) else {}
        name = item.get("id", "")
        name = f"item_{i}" if not name or name in found else name
        found[name] = {**item, **parts, "id": name}
    return list(found.values())
