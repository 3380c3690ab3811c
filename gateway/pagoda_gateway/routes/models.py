"""Lists the models that the caller may use; callers with the right to do so load and unload adapters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from pagoda_gateway.api.adapter_schemas import LoadAdapterRequest, UnloadAdapterRequest
from pagoda_gateway.api.answer_schemas import Model, ModelList
from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.keys.grants import LOAD_PATH, UNLOAD_PATH
from pagoda_gateway.routes.body import caller_of, json_response, read_body
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

    if ctx.config.lora_loading:
        _add_loading(routes, ctx)
    return routes


def _add_loading(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, LOAD_PATH, "Serve an adapter under a name", None, request=LoadAdapterRequest)
    async def load_adapter(request: Request) -> Response:
        body = await read_body(ctx, request, LoadAdapterRequest)
        await ctx.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    @endpoint(routes, UNLOAD_PATH, "Serve an adapter no more", None, request=UnloadAdapterRequest)
    async def unload_adapter(request: Request) -> Response:
        body = await read_body(ctx, request, UnloadAdapterRequest)
        ctx.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


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
