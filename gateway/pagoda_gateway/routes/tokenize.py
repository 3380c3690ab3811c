"""Tokenising without generating: POST /tokenize and /detokenize as vLLM has them, and Anthropic's count of tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.answer_schemas import CountTokensAnswer, DetokenizeAnswer, TokenizeAnswer
from pagoda_gateway.api.encoding import encoded_list
from pagoda_gateway.api.messages_schemas import CountTokensRequest
from pagoda_gateway.api.schemas import DetokenizeRequest, TokenizeRequest
from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.chat import chat_ids
from pagoda_gateway.dialects.logprobs import token_text
from pagoda_gateway.dialects.messages import MESSAGES, prompt_ids
from pagoda_gateway.generation.prompts import Reader, text_of
from pagoda_gateway.routes.body import caller_of, json_response, read_body, while_connected
from pagoda_gateway.routes.described import endpoint
from pagoda_proto.errors import InvalidParams, Problem


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["tokens"])
    _add_tokenize(routes, ctx)
    _add_count(routes, ctx)
    _add_detokenize(routes, ctx)
    return routes


def _add_tokenize(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, "/tokenize", "Token ids of a text or a conversation", TokenizeAnswer, request=TokenizeRequest)
    async def tokenize(request: Request) -> Response:
        body = await read_body(ctx, request, TokenizeRequest)
        model = ctx.catalogue.find(body.model, caller_of(request))
        max_model_len = model.limits.max_model_len
        token_ids = await while_connected(request, _token_ids(ctx, model, body, caller_of(request)))
        strings = (
            await encoded_list((token_text(model.text, i) for i in token_ids), 1) if body.return_token_strs else None
        )
        tokens = await encoded_list(token_ids, 1)
        return json_response(
            {"count": len(token_ids), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings}
        )


async def _token_ids(ctx: GatewayContext, model: ServedModel, body: TokenizeRequest, caller: Caller) -> list[int]:
    """Texts longer than the context are tokenised too, up to `max_tokenize_chars`."""
    param = "prompt" if body.messages is None else "messages"
    reader = Reader(ctx.pool, model, caller.key, param, max_chars=ctx.config.max_tokenize_chars)
    if body.messages is not None:
        return await chat_ids(reader, body, bool(body.add_special_tokens))
    (token_ids,) = await reader.text_ids([body.prompt or ""], body.add_special_tokens is not False)
    return token_ids


def _add_count(routes: APIRouter, ctx: GatewayContext) -> None:
    path, failure = f"{MESSAGES.path}/count_tokens", MESSAGES.error.schema

    @endpoint(
        routes,
        path,
        "How long a message's prompt is",
        CountTokensAnswer,
        request=CountTokensRequest,
        unavailable=failure,
    )
    async def count_tokens(request: Request) -> Response:
        body = await read_body(ctx, request, CountTokensRequest)
        caller = caller_of(request)
        model = ctx.catalogue.find(body.model, caller)
        reader = Reader(ctx.pool, model, caller.key, "messages", max_chars=ctx.config.max_tokenize_chars)
        token_ids = await while_connected(request, prompt_ids(reader, body))
        return json_response({"input_tokens": len(token_ids)})


def _add_detokenize(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, "/detokenize", "The text of token ids", DetokenizeAnswer, request=DetokenizeRequest)
    async def detokenize(request: Request) -> Response:
        body = await read_body(ctx, request, DetokenizeRequest)
        model = ctx.catalogue.find(body.model, caller_of(request))
        vocab_size = model.limits.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            bad = next(token_id for token_id in body.tokens if token_id >= vocab_size)
            raise InvalidParams([Problem("tokens", f"token ids must be between 0 and {vocab_size - 1}, got {bad}")])
        text = await while_connected(request, text_of(ctx.pool, model.text, caller_of(request).key, body.tokens))
        return json_response({"prompt": text})
