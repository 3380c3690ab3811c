"""API keys over HTTP, for callers with an admin key: create, list, show, revoke."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.accounts.schemas import CreateKeyRequest, KeyList, KeyObject, KeysQuery, NewKeyObject
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.requests import named_as_in_body
from pagoda_gateway.keys.api_key import ApiKey, NewKey
from pagoda_gateway.keys.grants import ADMIN_PATH, LIMITS, Limits, Role
from pagoda_gateway.routes.body import json_response, listed, query_of, read_body
from pagoda_gateway.routes.described import endpoint

PATH = f"{ADMIN_PATH}/keys"


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["keys"])
    _add_all(routes, ctx)
    _add_one(routes, ctx)
    return routes


def _add_all(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, PATH, "Make an API key, whose value is told once", NewKeyObject, request=CreateKeyRequest)
    async def create_key(request: Request) -> Response:
        body = await read_body(ctx, request, CreateKeyRequest)
        with named_as_in_body({name: f"limits.{name}" for name in LIMITS}):
            asked = NewKey(
                name=body.name,
                role=Role(body.role),
                models=None if body.models is None else tuple(body.models),
                limits=Limits(**{name: getattr(body.limits, name) for name in LIMITS}),
                weight=body.weight,
                expires_at=body.expires_at,
            )
            key, value = await ctx.keys.create(asked)
        answer = json_response(_shown(key) | {"value": value})
        answer.headers["cache-control"] = "no-store"
        return answer

    @endpoint(routes, PATH, "API keys, without their values", KeyList)
    async def list_keys(request: Request) -> Response:
        asked = query_of(request, KeysQuery)
        page = await ctx.keys.page(limit=asked.limit, after=asked.after, newest_first=asked.order == "desc")
        return json_response(listed([_shown(key) for key in page.keys], page.more))


def _add_one(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, f"{PATH}/{{key_id}}", "One API key", KeyObject)
    async def get_key(key_id: str) -> Response:
        return json_response(_shown(await ctx.keys.get(key_id)))

    @endpoint(routes, f"{PATH}/{{key_id}}", "Revoke an API key", KeyObject, method="DELETE")
    async def revoke_key(key_id: str) -> Response:
        return json_response(_shown(await ctx.keys.revoke(key_id)))


def _shown(key: ApiKey) -> dict[str, Any]:
    fields = {name: value for name, value in msgspec.structs.asdict(key).items() if name not in ("digest", "limits")}
    limits = msgspec.structs.asdict(key.limits)
    return fields | {
        "object": "api_key",
        "limits": limits,
        "state": key.state(time.time()),
        "redacted_value": key.shown,
    }
