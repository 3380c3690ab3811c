"""OpenAI's batches: a file of requests is answered when there is spare capacity, into a file of answers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.batches.batch import new_batch, shown
from pagoda_gateway.batches.batches import Batches
from pagoda_gateway.batches.files import BATCH, Files
from pagoda_gateway.batches.schemas import BatchesQuery, BatchList, BatchObject, BatchRequest, NoBody
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.routes.batch_service import ENDPOINTS
from pagoda_gateway.routes.body import caller_of, json_response, listed, query_of, read_body
from pagoda_gateway.routes.described import endpoint
from pagoda_gateway.routes.files import files_of
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem

PATH = "/v1/batches"


def router(ctx: GatewayContext, batches: Batches) -> APIRouter:
    routes = APIRouter(tags=["batches"])
    _add_create(routes, ctx, batches)
    _add_reading(routes, batches)
    _add_cancel(routes, ctx, batches)
    return routes


def _add_create(routes: APIRouter, ctx: GatewayContext, batches: Batches) -> None:
    files = files_of(ctx)

    @endpoint(routes, PATH, "Have a file of requests answered", BatchObject, request=BatchRequest)
    async def create_batch(request: Request) -> Response:
        body = await read_body(ctx, request, BatchRequest)
        owner = caller_of(request).tenant
        if body.endpoint not in ENDPOINTS:
            rule = f"must be one of {', '.join(ENDPOINTS)}, got {body.endpoint[:64]!a}"
            raise InvalidParams([Problem("endpoint", rule)])
        await _check_input(files, owner, body.input_file_id)
        kept_s = times.KEPT_S if body.output_expires_after is None else body.output_expires_after.seconds
        batch = new_batch(body.endpoint, body.input_file_id, body.metadata, kept_s, batches.clock())
        await batches.add(owner, batch)
        return json_response(shown(batch))


async def _check_input(files: Files, owner: str, file_id: str) -> None:
    """Raises InvalidParams if there is no such file, or it has another purpose."""
    try:
        info = await files.find(owner, file_id)
    except PagodaError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        raise InvalidParams([Problem("input_file_id", error.message)]) from error
    if info.purpose != BATCH:
        raise InvalidParams([Problem("input_file_id", f"is a file of purpose {info.purpose!r}, must be {BATCH!r}")])


def _add_reading(routes: APIRouter, batches: Batches) -> None:
    @endpoint(routes, PATH, "Batches", BatchList)
    async def list_batches(request: Request) -> Response:
        asked = query_of(request, BatchesQuery)
        page = await batches.page(caller_of(request).tenant, limit=asked.limit, after=asked.after)
        return json_response(listed([shown(batch) for batch in page.batches], page.more))

    @endpoint(routes, f"{PATH}/{{batch_id}}", "One batch", BatchObject)
    async def get_batch(request: Request, batch_id: str) -> Response:
        return json_response(shown(await batches.find(caller_of(request).tenant, batch_id)))


def _add_cancel(routes: APIRouter, ctx: GatewayContext, batches: Batches) -> None:
    @endpoint(routes, f"{PATH}/{{batch_id}}/cancel", "Answer no more of a batch", BatchObject, method="POST")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            await read_body(ctx, request, NoBody)
        return json_response(shown(await batches.cancel(caller_of(request).tenant, batch_id)))
