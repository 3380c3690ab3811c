"""Scores pairs of texts by a head that reads both, or by the similarity of their vectors or their tokens' vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.pooling.inputs import Asked, Inputs
from pagoda_gateway.pooling.vectors import cosine, floats
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.pooling.kinds import CLASSIFY
from pagoda_proto.pooling.params import EMBED, PoolingParams
from pagoda_proto.records import RequestRecord


class Scoring:
    """The pairs of one request: call `records` first, then pass the records' outputs to `scores`."""

    def __init__(self, ctx: GatewayContext, model: ServedModel, caller: Caller, asked: Asked) -> None:
        own = model.text.reading
        self._both = bool(own.of_pairs)
        if own.kind == CLASSIFY and len(model.text.reading.labels) != 1:
            count = len(model.text.reading.labels)
            message = f"{model.name!r} has {count} labels, and a score needs a model with one; use /classify"
            raise InvalidParams([Problem("model", message)])
        pooling = PoolingParams(output=own.of_pairs) if self._both else PoolingParams(output=EMBED, normalize=True)
        pooling = asked.pooling if own.kind == CLASSIFY else pooling
        if own.kind != CLASSIFY and asked.pooling.activate is False:
            raise InvalidParams(
                [Problem("raw_scores", "need a model with a head for scores; this one makes embeddings")]
            )
        self._inputs = Inputs(ctx, model, caller, replace(asked, pooling=pooling))
        self._pairs: list[tuple[int, int]] = []

    async def records(self, queries: Sequence[str], documents: Sequence[str]) -> list[RequestRecord]:
        """A single query applies to all documents; several queries apply to one document each. Raises PagodaError."""
        queries = list(queries) * (len(documents) if len(queries) == 1 else 1)
        if self._both:
            return await self._inputs.records(list(zip(queries, documents, strict=True)))
        places = {text: at for at, text in enumerate(dict.fromkeys([*queries, *documents]))}  # each text is read once
        self._pairs = [(places[q], places[d]) for q, d in zip(queries, documents, strict=True)]
        return await self._inputs.records(list(places))

    def scores(self, found: Sequence[bytes]) -> list[float]:
        """One score per document."""
        if self._both:
            return [floats(data)[0] for data in found]
        vectors = [floats(data) for data in found]
        return [cosine(vectors[query], vectors[document]) for query, document in self._pairs]


def ranked(scores: Sequence[float], most: int | None) -> list[int]:
    """Indices, the best first; ties keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:most]
