"""Transcripts of finished requests, for their callers; and recomputing one, to check that the answer is the same."""

from __future__ import annotations

import secrets
import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.answer_schemas import TranscriptShown
from pagoda_gateway.api.json_body import check_content_type
from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller, origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.job import Job, Shown
from pagoda_gateway.generation.prompts import at_most
from pagoda_gateway.generation.requests import check_products, held_bytes, new_record
from pagoda_gateway.generation.running import running, transcribed
from pagoda_gateway.generation.transcripts import MAX_TRANSCRIPT_BYTES, Outcomes, Transcript, read_transcript
from pagoda_gateway.http.sse import until_disconnect
from pagoda_gateway.routes.body import caller_of, hold_for, timeout_of
from pagoda_gateway.routes.described import JSON, endpoint
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.records import RequestRecord

ONE, AGAIN = "/v1/requests/{request_id}/transcript", "/v1/requests/replay"
BYTES_PER_BYTE = 16  # memory of a parsed transcript per byte of its JSON


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @endpoint(routes, ONE, "What one of the caller's last requests asked and was answered", TranscriptShown)
    async def transcript(request: Request, request_id: str) -> Response:
        data = await ctx.transcripts.find(caller_of(request).tenant, request_id) if ctx.transcripts.wanted else None
        if data is None:
            kept = "" if ctx.transcripts.wanted else "; this server keeps none (--keep-transcripts)"
            raise PagodaError(ErrorCode.NOT_FOUND, f"there is no transcript of {request_id[:64]!a}{kept}")
        return Response(data, media_type=JSON, headers={"cache-control": "no-store"})

    @endpoint(routes, AGAIN, "The transcript of the same, computed again", TranscriptShown, request=TranscriptShown)
    async def replay(request: Request) -> Response:
        arrived_at, timeout_s = time.time(), timeout_of(request.headers)
        job = _job(ctx, await _asked(ctx, request), caller_of(request))
        hold_for(request, held_bytes(job), instead=True)
        async with until_disconnect(request.receive):
            found = await _computed(
                ctx, job if timeout_s is None else job.due(arrived_at + timeout_s, timeout_s), request
            )
        return Response(msgspec.json.encode(found), media_type=JSON, headers={"cache-control": "no-store"})

    return routes


async def _asked(ctx: GatewayContext, request: Request) -> Transcript:
    check_content_type(request.headers.get("content-type", ""))
    data = b"".join([chunk async for chunk in request.stream() if chunk])
    if len(data) > MAX_TRANSCRIPT_BYTES:
        raise too_large()
    hold_for(request, BYTES_PER_BYTE * len(data))
    return await ctx.pool.run(caller_of(request).key, len(data), lambda: _read(data))


def _read(data: bytes) -> Transcript:
    """Parse without the answer, which only the client compares: it may be far larger than the request."""
    try:
        kept = read_transcript(data)
    except ValueError as error:
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, str(error)) from error
    parts = [msgspec.structs.replace(part, choices=[], prompt_logprobs=None) for part in kept.parts]
    return msgspec.structs.replace(kept, parts=parts)


async def _computed(ctx: GatewayContext, job: Job, request: Request) -> Transcript:
    caller, outcomes = caller_of(request), Outcomes()
    charge = ctx.charge_for(caller, job.model)
    charge.check(job.num_prompt_tokens)
    async with running(ctx, job, caller.key, charge, outcomes=outcomes) as run:
        while await run.next():
            pass
        found = transcribed(run, outcomes)
    if found is None:
        raise too_large()
    return found


def too_large() -> PagodaError:
    return PagodaError(ErrorCode.REQUEST_TOO_LARGE, f"a transcript has at most {MAX_TRANSCRIPT_BYTES} bytes")


def _model_of(ctx: GatewayContext, kept: Transcript, caller: Caller) -> ServedModel:
    """Find the model by its adapter's digest, whatever its name here. Raises PagodaError MODEL_NOT_FOUND."""
    for model in ctx.catalogue.of(caller):
        if kept.adapter == ("" if model.adapter is None else model.adapter.digest):
            return model
    what = f"an adapter of digest {kept.adapter[:16]}.." if kept.adapter else "a model without an adapter"
    raise PagodaError(ErrorCode.MODEL_NOT_FOUND, f"{what} is not served here, or not for this key", "adapter")


def _job(ctx: GatewayContext, kept: Transcript, caller: Caller) -> Job:
    """Build the job, checked like any request. Raises PagodaError."""
    model = _model_of(ctx, kept, caller)
    at_most("parts", len(kept.parts), ctx.config.max_prompts)
    at_most("functions", len(kept.how.functions), ctx.config.max_tools)
    first = kept.parts[0].record.task.params
    if any(part.record.task.params != first for part in kept.parts):
        raise InvalidParams([Problem("parts", "all parts of a request have the same parameters")])
    shown = Shown(
        n=first.n,
        how=kept.how,
        logprobs=first.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        form_field="grammar",
    )
    check_products(ctx.config, model, first, [len(part.record.prompt_token_ids) for part in kept.parts], shown)
    records = tuple(_record(model, part.record, caller) for part in kept.parts)
    name = f"replay-{secrets.token_hex(16)}"
    return Job(id=name, created=int(time.time()), model=model.name, records=records, shown=shown)


def _record(model: ServedModel, kept: RequestRecord, caller: Caller) -> RequestRecord:
    record = new_record(model, kept.prompt_token_ids, kept.task.params, origin_of(caller), 0)
    return msgspec.structs.replace(record, task=kept.task)
