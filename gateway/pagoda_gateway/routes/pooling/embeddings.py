"""Vectors and labels of texts: OpenAI's embeddings, vLLM's pooling and classify, text-embeddings-inference's embed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.encoding import encoded_list
from pagoda_gateway.api.pooling_answers import ClassifyAnswer, EmbeddingsAnswer, PoolingAnswer, Vectors
from pagoda_gateway.api.pooling_schemas import ClassifyRequest, EmbeddingsRequest, EmbedRequest, PoolingRequest
from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.pooling.asked import Asked
from pagoda_gateway.pooling.inputs import Inputs
from pagoda_gateway.pooling.vectors import BASE64, floats, of_tokens, shown
from pagoda_gateway.routes.body import json_response
from pagoda_gateway.routes.described import endpoint
from pagoda_gateway.routes.pooling.answering import Place, as_list, asking, given, listed
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.pooling.kinds import CLASSIFY, EMBED
from pagoda_proto.pooling.params import TOKEN_EMBED, PoolingParams
from pagoda_proto.records import RequestRecord

PATH = "/v1/embeddings"


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["embeddings"])
    _add_embeddings(routes, ctx)
    _add_pooling(routes, ctx)
    _add_classify(routes, ctx)
    _add_embed(routes, ctx)
    return routes


def _asked(body: EmbeddingsRequest | ClassifyRequest, pooling: PoolingParams) -> Asked:
    return Asked(
        param="input",
        pooling=pooling,
        keep=body.truncate_prompt_tokens,
        special=body.add_special_tokens,
        prompt_name=getattr(body, "prompt_name", None),
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


async def _read(place: Place, asked: Asked, value: Any) -> tuple[list[RequestRecord], list[bytes]]:
    records = await Inputs(place.ctx, place.model, place.caller, asked).records(given(value))
    return records, await place.read(records)


def _add_embeddings(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, PATH, "Vectors of texts", EmbeddingsAnswer, request=EmbeddingsRequest)
    async def embeddings(request: Request) -> Response:
        async with asking(ctx, request, EmbeddingsRequest, EMBED) as (body, place):
            return json_response(await embedded(place, body))


async def embedded(place: Place, body: EmbeddingsRequest) -> dict[str, Any]:
    """Return the answer to a body. Raises PagodaError."""
    pooling = PoolingParams(output=EMBED, normalize=body.normalize, dimensions=body.dimensions or 0)
    records, found = await _read(place, _asked(body, pooling), body.input)
    data = (
        {"index": i, "object": "embedding", "embedding": shown(one, body.encoding_format)}
        for i, one in enumerate(found)
    )
    return await listed(place, "embd", data, place.model.text.reading.width, records)


def _add_pooling(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, "/pooling", "What the model makes of texts", PoolingAnswer, request=PoolingRequest)
    async def pooling(request: Request) -> Response:
        async with asking(ctx, request, PoolingRequest, EMBED, CLASSIFY) as (body, place):
            output = body.task or place.model.text.reading.output
            if body.activation is not None and output != CLASSIFY:
                message = f"applies to scores only, but the output is {output}"
                raise InvalidParams([Problem("activation", message)])
            asked = PoolingParams(
                output=output,
                normalize=body.normalize,
                activate=body.activation,
                dimensions=body.dimensions or 0,
            )
            records, found = await _read(place, _asked(body, asked), body.input)
            shows = partial(_pooled, model=place.model, output=output, encoding=body.encoding_format)
            data = (
                {"index": i, "object": "pooling", "data": shows(one, record)}
                for i, (one, record) in enumerate(zip(found, records, strict=True))
            )
            return json_response(await listed(place, "pool", data, place.model.text.reading.width, records))


def _pooled(data: bytes, record: RequestRecord, model: ServedModel, output: str, encoding: str | None) -> Any:
    """Vectors of tokens are a list per token, but one string in base64."""
    if output != TOKEN_EMBED:
        return shown(data, encoding)
    late = model.text.reading.late
    vectors = of_tokens(data, record.prompt_token_ids, None if late is None else late.marks)
    return shown(b"".join(vectors), encoding) if encoding == BASE64 else [floats(one) for one in vectors]


def _add_classify(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, "/classify", "Labels of texts", ClassifyAnswer, request=ClassifyRequest)
    async def classify(request: Request) -> Response:
        async with asking(ctx, request, ClassifyRequest, CLASSIFY) as (body, place):
            asked = PoolingParams(output=CLASSIFY, activate=body.activation)
            records, found = await _read(place, _asked(body, asked), body.input)
            labels = place.model.text.reading.labels
            data = _classes(found, labels)
            return json_response(await listed(place, "classify", data, 1 + len(labels), records))


def _classes(found: Sequence[bytes], labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    for index, data in enumerate(found):
        scores = floats(data)
        best = max(range(len(scores)), key=scores.__getitem__)
        label = labels[best] if best < len(labels) else f"LABEL_{best}"
        yield {"index": index, "label": label, "probs": scores, "num_classes": len(scores)}


def _add_embed(routes: APIRouter, ctx: GatewayContext) -> None:
    @endpoint(routes, "/embed", "Vectors of texts, and nothing else", Vectors, request=EmbedRequest)
    async def embed(request: Request) -> Response:
        async with asking(ctx, request, EmbedRequest, EMBED) as (body, place):
            asked = Asked(
                param="inputs",
                pooling=PoolingParams(output=EMBED, normalize=body.normalize, dimensions=body.dimensions or 0),
                keep=-1 if body.truncate else None,
                keep_param="truncate",
                left=(body.truncation_direction or "").lower() == "left",
                prompt_name=body.prompt_name,
            )
            _, found = await _read(place, asked, as_list(body.inputs))
            vectors = await encoded_list(map(floats, found), place.model.text.reading.width)
            return Response(bytes(vectors), media_type="application/json")
