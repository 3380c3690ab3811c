"""Endpoints that generate: a body in, a job that runs while its client stays, its answer out whole or as a stream.

They differ only in their dialect. A request with an Idempotency-Key is read from its ticket.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.chat import CHAT
from pagoda_gateway.dialects.completions import COMPLETIONS
from pagoda_gateway.dialects.dialect import Dialect, Writer
from pagoda_gateway.dialects.messages import MESSAGES
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.requests import check_generates, held_bytes
from pagoda_gateway.generation.running import running
from pagoda_gateway.http.sse import EventStream, until_disconnect
from pagoda_gateway.keys.charge import Charge
from pagoda_gateway.routes.body import caller_of, due_at_of, hold_for, read_body, timeout_of, while_connected
from pagoda_gateway.routes.described import JSON, endpoint
from pagoda_gateway.tickets.naming import Named, Naming, Opened, headers_of, reader_of
from pagoda_gateway.tickets.tickets import NewJob, Tickets

DIALECTS: Sequence[Dialect[Any]] = (CHAT, COMPLETIONS, MESSAGES)
ERROR_SHAPES = {dialect.path: dialect.error for dialect in DIALECTS}
Writing = Callable[[], AbstractAsyncContextManager[Writer]]


def router(ctx: GatewayContext, tickets: Tickets, dialects: Sequence[Dialect[Any]] = DIALECTS) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    for each in dialects:
        path, failure = each.path, each.error.schema
        add = endpoint(routes, path, each.summary, each.answer, request=each.body, unavailable=failure, name=each.name)
        add(_answering(ctx, tickets, each))
    return routes


@asynccontextmanager
async def writing(
    ctx: GatewayContext, dialect: Dialect[Any], job: Job, caller: Caller, charge: Charge
) -> AsyncIterator[Writer]:
    """Run a job, and yield its writer. Raises PagodaError if the engine core refuses it."""
    async with running(ctx, job, caller.key, charge) as run:
        yield dialect.writer(ctx, run, None)


def _answering(
    ctx: GatewayContext, tickets: Tickets, dialect: Dialect[Any]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        naming = Naming(request)
        bodies = [await read_body(ctx, request, dialect.body, naming.seen)]
        return await respond(ctx, tickets, dialect, request, bodies, naming.named(bodies[0], caller_of(request).tenant))

    return answer


async def respond(
    ctx: GatewayContext,
    tickets: Tickets,
    dialect: Dialect[Any],
    request: Request,
    bodies: list[Any],
    named: Named | None,
) -> Response:
    """Answer the body in `bodies`, and remove it from there, so that nothing keeps it while its job runs."""
    stream, new_job, due_at = bodies[0].stream, job_maker(ctx, dialect, request, bodies), due_at_of(request.headers)
    opened = Opened(None, None) if named is None else await while_connected(request, tickets.open(named, new_job))
    if opened.found is None:
        reading: Writing = partial(_plainly, ctx, dialect, caller_of(request), opened.job or new_job)
    else:
        bodies.clear()
        hold_for(request, 0, instead=True)  # the job's runner holds it, not the request
        charge, reader = partial(ctx.charge_for, caller_of(request)), reader_of(request)._replace(due_at=due_at)
        reading = partial(tickets.reading, opened.found, opened.job, dialect, charge, reader)
    headers = headers_of(named, opened)
    if stream:
        ping = dialect.ping(ids=opened.found is not None)
        return EventStream(_events(reading), ctx.config.ping_interval_s, ping, headers)
    async with until_disconnect(request.receive), reading() as writer:
        return Response(await writer.whole(), media_type=JSON, headers=dict(headers))


@asynccontextmanager
async def _plainly(
    ctx: GatewayContext, dialect: Dialect[Any], caller: Caller, job: Job | NewJob
) -> AsyncIterator[Writer]:
    job = job if isinstance(job, Job) else await job()
    async with writing(ctx, dialect, job, caller, ctx.charge_for(caller, job.model)) as writer:
        yield writer


async def _events(writing: Writing) -> AsyncGenerator[bytes, None]:
    async with writing() as writer:
        async for data in writer.events():
            yield data


def job_maker(ctx: GatewayContext, dialect: Dialect[Any], request: Request, bodies: list[Any]) -> NewJob:
    """Return a function that turns the body in `bodies` into a job, after which nothing keeps the body."""
    caller, arrived_at, timeout_s = caller_of(request), time.time(), timeout_of(request.headers)

    async def new_job() -> Job:
        await ctx.adapters.resolve(bodies[0].model, caller)
        check_generates(ctx.catalogue.find(bodies[0].model, caller))
        job = await dialect.job(ctx, bodies.pop(), caller)
        hold_for(request, held_bytes(job), instead=True)
        ctx.charge_for(caller, job.model).check(job.num_prompt_tokens)
        return job if timeout_s is None else job.due(arrived_at + timeout_s, timeout_s)

    return new_job
