"""Endpoints that generate: a body in, a job run while its client stays, its answer out whole or as a stream.

They differ in their dialect, and in nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
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
from pagoda_gateway.generation.requests import check_generates, held_bytes, named_as_in_body
from pagoda_gateway.generation.run import Outcome, Run
from pagoda_gateway.http.sse import EventStream, until_disconnect
from pagoda_gateway.keys.charge import Charge
from pagoda_gateway.routes.body import caller_of, hold_for, read_body
from pagoda_gateway.routes.described import endpoint
from pagoda_proto.records import Usage

logger = logging.getLogger(__name__)


DIALECTS: Sequence[Dialect[Any]] = (CHAT, COMPLETIONS, MESSAGES)
ERROR_SHAPES = {dialect.path: dialect.error for dialect in DIALECTS}


def router(ctx: GatewayContext, dialects: Sequence[Dialect[Any]] = DIALECTS) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    for each in dialects:
        path, failure = each.path, each.error.schema
        add = endpoint(routes, path, each.summary, each.answer, request=each.body, unavailable=failure, name=each.name)
        add(_answering(ctx, each))
    return routes


@asynccontextmanager
async def writing(
    ctx: GatewayContext, dialect: Dialect[Any], job: Job, caller: Caller, charge: Charge
) -> AsyncIterator[Writer]:
    """Run a job, whoever asked for it. Raises PagodaError where the engine core does not take it."""
    model = ctx.catalogue.of_job(job.model)

    def on_end(usage: Usage, outcome: Outcome) -> None:
        charge.end(usage)
        logger.debug("%s for %s: %s, %s", job.id, caller.key, outcome, usage)

    async with aclosing(Run(job, model.text, on_end)) as run:
        charge.begin(run.usage)
        with named_as_in_body({"grammar": job.shown.form_field}):
            await run.start(model.engine)
        charge.taken()
        yield dialect.writer(ctx, run)


def _answering(ctx: GatewayContext, dialect: Dialect[Any]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await respond(ctx, dialect, request, [await read_body(ctx, request, dialect.body)])

    return answer


async def respond(ctx: GatewayContext, dialect: Dialect[Any], request: Request, bodies: list[Any]) -> Response:
    """The answer to the body in `bodies`, which is taken from there, so that nobody keeps it while its job runs."""
    caller = caller_of(request)

    @asynccontextmanager
    async def running() -> AsyncIterator[Writer]:
        check_generates(ctx.catalogue.find(bodies[0].model, caller))
        job = await dialect.job(ctx, bodies.pop(), caller)  # which is all that is left of the body
        hold_for(request, held_bytes(job), instead=True)
        charge = ctx.charge_for(caller, job.model)
        charge.check(job.num_prompt_tokens)
        async with writing(ctx, dialect, job, caller, charge) as writer:
            yield writer

    async def events() -> AsyncGenerator[bytes, None]:
        async with running() as writer:
            async for data in writer.events():
                yield data

    if bodies[0].stream:
        return EventStream(events(), ctx.config.ping_interval_s, dialect.ping)
    async with until_disconnect(request.receive), running() as writer:
        return Response(await writer.whole(), media_type="application/json")
