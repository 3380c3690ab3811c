"""Answers a line of a batch with the code that would answer it as a request: the same body, job, run and writer.

The difference is that no client waits for it: it runs behind all requests with waiting clients, and is never a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from pagoda_gateway.api.encoding import encoded
from pagoda_gateway.api.json_body import MAX_VALUES, parse_object, parsed_bytes
from pagoda_gateway.api.pooling_schemas import EmbeddingsRequest
from pagoda_gateway.batches.batches import Batches
from pagoda_gateway.batches.lines import ENVELOPE_BYTES
from pagoda_gateway.batches.runner import BatchRunner
from pagoda_gateway.batches.work import Desk
from pagoda_gateway.clients import NOBODY, Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.chat import CHAT
from pagoda_gateway.dialects.completions import COMPLETIONS
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.dialects.responses import RESPONSES
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.requests import check_generates, held_bytes
from pagoda_gateway.http.memory import Holding
from pagoda_gateway.routes.body import Body, checked_body
from pagoda_gateway.routes.files import files_of
from pagoda_gateway.routes.generating import writing
from pagoda_gateway.routes.pooling.answering import Place, model_for
from pagoda_gateway.routes.pooling.embeddings import PATH as EMBEDDINGS
from pagoda_gateway.routes.pooling.embeddings import embedded
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import in_background
from pagoda_proto.pooling.kinds import EMBED

DIALECTS: dict[str, Dialect[Any]] = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES)}
ENDPOINTS = (*DIALECTS, EMBEDDINGS)
CLIENT = "batches"  # the client that batches count as where clients take turns
SHARE = 4  # a line may take 1/SHARE of the memory for requests


class BatchService:
    """Implements `Service`."""

    def __init__(self, ctx: GatewayContext) -> None:
        self._ctx = ctx

    def known(self, model: str | None) -> str:
        """The model's name, which may be an adapter that its first line will load. Raises PagodaError."""
        try:
            return self._ctx.catalogue.find(model, NOBODY).name
        except PagodaError:
            if model is None or not self._ctx.adapters.is_found(model):
                raise
            return model

    async def in_thread(self, num_bytes: int, work: Callable[[], None]) -> None:
        await self._ctx.pool.run(CLIENT, num_bytes, work)

    async def answer(self, endpoint: str, line: bytes, owner: str) -> bytes:
        size = parsed_bytes(line)
        if size > self._ctx.config.max_held_bytes // SHARE:
            raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, "the line is larger than this server can read at once")
        caller = Caller(CLIENT, owner, await self._ctx.gate.grant_of(owner))
        holding = self._ctx.memory.holding(CLIENT)
        try:
            holding.grow_to(size)
            answer = self._embedded if endpoint == EMBEDDINGS else partial(self._generated, DIALECTS[endpoint])
            return await answer(line, caller, holding)
        finally:
            holding.release()

    async def _generated(self, dialect: Dialect[Any], line: bytes, caller: Caller, holding: Holding) -> bytes:
        body = await self._body(dialect.body, line)
        await self._ctx.adapters.resolve(body.model, caller)
        check_generates(self._ctx.catalogue.find(body.model, caller))
        job = behind_all(await dialect.job(self._ctx, body, caller))
        del body
        _hold(holding, held_bytes(job))
        charge = self._ctx.charge_for_batch(caller.tenant, job.model)
        async with writing(self._ctx, dialect, job, caller, charge) as writer:
            return await writer.whole()

    async def _embedded(self, line: bytes, caller: Caller, holding: Holding) -> bytes:
        body = await self._body(EmbeddingsRequest, line)
        model = model_for(self._ctx, body.model, caller, EMBED)
        charge = self._ctx.charge_for_batch(caller.tenant, model.name)
        place = Place(self._ctx, model, caller, charge, partial(_hold, holding), priority=in_background)
        return encoded(await embedded(place, body))

    async def _body(self, schema: type[Body], line: bytes) -> Body:
        return await self._ctx.pool.run(CLIENT, len(line), lambda: self._checked(schema, line))

    def _checked(self, schema: type[Body], line: bytes) -> Body:
        body = checked_body(self._ctx, schema, parse_object(line, MAX_VALUES)["body"])
        for name in ("stream", "background"):
            if getattr(body, name, None):
                raise InvalidParams([Problem(name, "must be false in a batch")])
        return body


def _hold(holding: Holding, num_bytes: int) -> None:
    """Hold this much instead of what was held."""
    holding.release()
    holding.grow_to(num_bytes)


def batch_runner(
    ctx: GatewayContext, batches: Batches, on_result: Callable[[bool], None] = lambda failed: None
) -> BatchRunner:
    """Build the batch runner, not started yet. `on_result` is called for every line with whether it failed."""
    desk = Desk(
        batches=batches,
        files=files_of(ctx),
        service=BatchService(ctx),
        slots=asyncio.Semaphore(ctx.config.max_batch_requests),
        max_line_bytes=ctx.config.max_body_bytes + ENVELOPE_BYTES,
        on_result=on_result,
    )
    return BatchRunner(desk)


def behind_all(job: Job) -> Job:
    """Move a job behind all requests with waiting clients, keeping the order of the priorities that lines asked for."""
    records = (msgspec.structs.replace(record, priority=in_background(record.priority)) for record in job.records)
    return msgspec.structs.replace(job, records=tuple(records))
