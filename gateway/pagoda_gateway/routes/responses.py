"""POST /v1/responses, and what becomes of a response afterwards: looked up, followed, cancelled, deleted."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.described import endpoint
from pagoda_gateway.api.responses_answers import DeletedResponse, InputItems, ResponseAnswer
from pagoda_gateway.api.responses_schemas import ResponsesRequest
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.responses import RESPONSES, kept_by
from pagoda_gateway.generation.requests import named_as_in_body
from pagoda_gateway.http.sse import EventStream
from pagoda_gateway.routes.body import caller_of, json_response, read_body, while_connected
from pagoda_gateway.routes.generating import respond
from pagoda_proto.errors import InvalidParams, Problem

JSON = "application/json"
MOST_ITEMS = 100
ONE = "/v1/responses/{response_id}"


def router(ctx: GatewayContext, background: BackgroundResponses) -> APIRouter:
    routes = APIRouter(tags=["responses"])
    _add_create(routes, ctx, background)
    _add_retrieve(routes, ctx, background)
    _add_cancel(routes, ctx, background)
    _add_delete(routes, ctx)
    _add_input_items(routes, ctx)
    return routes
