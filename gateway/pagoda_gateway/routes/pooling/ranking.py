"""Relevance of texts to one another: vLLM's score, and reranking as Jina, Cohere and text-embeddings-inference do."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.encoding import encoded
from pagoda_gateway.api.pooling_answers import RerankAnswers, ScoreAnswer
from pagoda_gateway.api.pooling_schemas import Document, RerankRequest, ScoreRequest
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.pooling.asked import Asked
from pagoda_gateway.pooling.scoring import Scoring, ranked
from pagoda_gateway.routes.body import json_response
from pagoda_gateway.routes.described import endpoint
from pagoda_gateway.routes.pooling.answering import Place, as_list, asking, listed, usage_of
from pagoda_proto.pooling.kinds import CLASSIFY, EMBED
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import RequestRecord

COHERE = "/v2/rerank"


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter(tags=["ranking"])
    for path in ("/score", "/v1/score"):
        _add_score(routes, ctx, path)
    for path in ("/rerank", "/v1/rerank", COHERE):
        _add_rerank(routes, ctx, path)
    return routes


def _add_score(routes: APIRouter, ctx: GatewayContext, path: str) -> None:
    summary = "How well texts go together"

    @endpoint(routes, path, summary, ScoreAnswer, request=ScoreRequest, name=_name(path))
    async def score(request: Request) -> Response:
        async with asking(ctx, request, ScoreRequest, CLASSIFY, EMBED) as (body, place):
            asked = _asked(body, "text_1", "text_2", body.activation)
            records, scores = await _scored(place, asked, as_list(body.text_1), as_list(body.text_2))
            data = ({"index": i, "object": "score", "score": one} for i, one in enumerate(scores))
            return json_response(await listed(place, "score", data, 1, records))


def _asked(body: ScoreRequest | RerankRequest, first: str, second: str, activate: bool | None) -> Asked:
    return Asked(
        first_param=first,
        param=second,
        pooling=PoolingParams(output=CLASSIFY, activate=activate),
        keep=body.truncate_prompt_tokens,
        instruction=body.instruction,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


async def _scored(
    place: Place, asked: Asked, queries: list[str], documents: list[str]
) -> tuple[list[RequestRecord], list[float]]:
    scoring = Scoring(place.ctx, place.model, place.caller, asked)
    records = await scoring.records(queries, documents)
    return records, scoring.scores(await place.read(records))


def _add_rerank(routes: APIRouter, ctx: GatewayContext, path: str) -> None:
    @endpoint(routes, path, "Texts by how well they answer", RerankAnswers, request=RerankRequest, name=_name(path))
    async def rerank(request: Request) -> Response:
        async with asking(ctx, request, RerankRequest, CLASSIFY, EMBED) as (body, place):
            if body.texts is not None:
                return Response(encoded(await _rank_texts(place, body, body.texts)), media_type="application/json")
            documents = [one.text if isinstance(one, Document) else one for one in body.documents or ()]
            return json_response(await _rank(place, body, documents, path))


async def _rank(place: Place, body: RerankRequest, documents: list[str], path: str) -> dict[str, Any]:
    asked = replace(_asked(body, "query", "documents", None), document=body.max_tokens_per_doc)
    records, scores = await _scored(place, asked, [body.query], documents)
    shows = path != COHERE if body.return_documents is None else body.return_documents
    results = [
        {"index": i, "relevance_score": scores[i]} | ({"document": {"text": documents[i]}} if shows else {})
        for i in ranked(scores, body.top_n)
    ]
    answer = {"id": f"rerank-{secrets.token_hex(16)}", "model": place.model.name, "usage": usage_of(records)}
    meta = {"meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}} if path == COHERE else {}
    return answer | {"results": results} | meta


async def _rank_texts(place: Place, body: RerankRequest, texts: list[str]) -> list[dict[str, Any]]:
    asked = replace(_asked(body, "query", "texts", False if body.raw_scores else None), raw_param="raw_scores")
    if body.truncate:
        asked = replace(asked, keep=-1, keep_param="truncate")
    _, scores = await _scored(place, asked, [body.query], texts)
    return [
        {"index": i, "score": scores[i]} | ({"text": texts[i]} if body.return_text else {})
        for i in ranked(scores, None)
    ]


def _name(path: str) -> str:
    return path.strip("/").replace("/", "_")
