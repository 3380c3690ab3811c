"""GET /v1/models: the models this gateway serves, of those the caller may use."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.answer_schemas import Model, ModelList
from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.routes.body import caller_of, json_response
from pagoda_gateway.routes.described import endpoint


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["models"])

    @endpoint(routes, "/v1/models", "All models", ModelList)
    async def list_models(request: Request) -> Response:
        models = ctx.catalogue.of(caller_of(request))
        return json_response({"object": "list", "data": [_shown(model) for model in models]})

    @endpoint(routes, "/v1/models/{model_id:path}", "One model", Model)
    async def get_model(request: Request, model_id: str) -> Response:
        return json_response(_shown(ctx.catalogue.find(model_id, caller_of(request))))

    return routes


def _shown(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "pagoda",
        "root": model.adapter.path if model.adapter else model.name,
        "parent": model.parent,
        "max_model_len": model.max_model_len or None,
    }
