"""POST /tokenize and /detokenize, in vLLM's shapes: what the model would see, and what tokens say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.context import GatewayContext
from pagoda_gateway.logprobs import token_text
from pagoda_gateway.requests import chat_prompt, check_model, in_thread_if_long, model_limits, read_body
from pagoda_gateway.respond import described, json_response
from pagoda_gateway.schemas import DetokenizeRequest, TokenizeRequest
from pagoda_proto.errors import InvalidParams, Problem

Endpoint = Callable[[Request], Awaitable[Response]]


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["tokens"])
    routes.add_api_route(
        "/tokenize",
        _tokenize(ctx),
        methods=["POST"],
        response_model=None,
        summary="Token ids of a text or a conversation",
        openapi_extra=described("/tokenize", TokenizeRequest),
    )
    routes.add_api_route(
        "/detokenize",
        _detokenize(ctx),
        methods=["POST"],
        response_model=None,
        summary="The text of token ids",
        openapi_extra=described("/detokenize", DetokenizeRequest),
    )
    return routes


def _tokenize(ctx: GatewayContext) -> Endpoint:
    async def tokenize(request: Request) -> Response:
        body = await read_body(ctx, request, TokenizeRequest)
        check_model(ctx, body.model)
        token_ids = await _token_ids(ctx, body)
        strings = [token_text(ctx.text, token_id) for token_id in token_ids] if body.return_token_strs else None
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": model_limits(ctx).max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    return tokenize


async def _token_ids(ctx: GatewayContext, body: TokenizeRequest) -> list[int]:
    """Texts longer than the context may be counted too: the size of the body bounds them."""
    if body.prompt is None:
        prompt = await chat_prompt(ctx, body, None, bool(body.add_special_tokens))
        return prompt.token_ids
    text, special = body.prompt, body.add_special_tokens is not False
    return await in_thread_if_long(len(text), lambda: ctx.text.encode(text, special))


def _detokenize(ctx: GatewayContext) -> Endpoint:
    async def detokenize(request: Request) -> Response:
        body = await read_body(ctx, request, DetokenizeRequest)
        check_model(ctx, body.model)
        vocab_size = model_limits(ctx).vocab_size
        bad = next((token_id for token_id in body.tokens if token_id >= vocab_size), None)
        if bad is not None:
            raise InvalidParams([Problem("tokens", f"token ids must be between 0 and {vocab_size - 1}, got {bad}")])
        text = await in_thread_if_long(len(body.tokens), lambda: ctx.text.decode(body.tokens, False))
        return json_response({"prompt": text})

    return detokenize
