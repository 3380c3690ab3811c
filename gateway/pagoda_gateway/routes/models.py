"""GET /v1/models: the one model this gateway serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from pagoda_gateway.api.answer_schemas import Model, ModelList
from pagoda_gateway.api.described import described
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.requests import check_model
from pagoda_gateway.routes.body import json_response


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["models"])

    @routes.get(
        "/v1/models",
        response_model=None,
        summary="All models",
        openapi_extra=described("/v1/models", None, ModelList),
    )
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [_model(ctx)]})

    @routes.get(
        "/v1/models/{model_id:path}",
        response_model=None,
        summary="One model",
        openapi_extra=described("/v1/models/{model_id}", None, Model),
    )
    async def get_model(model_id: str) -> Response:
        check_model(ctx, model_id)
        return json_response(_model(ctx))

    return routes


def _model(ctx: GatewayContext) -> dict[str, Any]:
    return {
        "id": ctx.served_model_name,
        "object": "model",
        "created": ctx.created,
        "owned_by": "pagoda",
        "root": ctx.served_model_name,
        "parent": None,
        "max_model_len": ctx.engine.load.max_model_len or ctx.text.max_model_len or None,
    }
