"""Scores pairs of texts by a head that reads both, or by the similarity of their vectors or their tokens' vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.pooling.asked import Asked, check_scores
from pagoda_gateway.pooling.inputs import Entry, Inputs, named
from pagoda_gateway.pooling.vectors import cosine, floats
from pagoda_proto.pooling.kinds import CLASSIFY
from pagoda_proto.pooling.params import EMBED, PoolingParams
from pagoda_proto.records import RequestRecord


class Scoring:
    """The pairs of one request: call `records` first, then pass the records' outputs to `scores`."""

    def __init__(self, ctx: GatewayContext, model: ServedModel, caller: Caller, asked: Asked) -> None:
        own = model.text.reading
        check_scores(own, asked)
        self._both = bool(own.of_pairs)
        pooling = PoolingParams(output=own.of_pairs) if self._both else PoolingParams(output=EMBED, normalize=True)
        self._asked = replace(asked, pooling=asked.pooling if own.kind == CLASSIFY else pooling)
        self._inputs = Inputs(ctx, model, caller, self._asked)
        self._pairs: list[tuple[int, int]] = []

    async def records(self, queries: Sequence[str], documents: Sequence[str]) -> list[RequestRecord]:
        """A single query applies to all documents; several queries apply to one document each. Raises PagodaError."""
        asked = self._asked
        firsts = [Entry(one, (named(asked.first_param, i, len(queries)),)) for i, one in enumerate(queries)]
        firsts *= len(documents) if len(queries) == 1 else 1
        names = [named(asked.param, i, len(documents)) for i in range(len(documents))]
        seconds = [Entry(one, (name,), asked.document) for one, name in zip(documents, names, strict=True)]
        both = list(zip(firsts, seconds, strict=True))
        if self._both:
            return await self._inputs.read([_together(*pair) for pair in both])
        places: dict[tuple[tuple[str, ...], int | None], int] = {}  # each text is read once
        unlike: list[Entry] = []
        for one in (*firsts, *seconds):
            if places.setdefault((one.texts, one.document), len(unlike)) == len(unlike):
                unlike.append(one)
        self._pairs = [(places[q.texts, q.document], places[d.texts, d.document]) for q, d in both]
        return await self._inputs.read(unlike)

    def scores(self, found: Sequence[bytes]) -> list[float]:
        """One score per document."""
        if self._both:
            return [floats(data)[0] for data in found]
        vectors = [floats(data) for data in found]
        return [cosine(vectors[query], vectors[document]) for query, document in self._pairs]


def _together(query: Entry, document: Entry) -> Entry:
    (first,), (second,) = query.texts, document.texts
    return Entry((first, second), query.params + document.params, document.document)


def ranked(scores: Sequence[float], most: int | None) -> list[int]:
    """Indices, the best first; ties keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:most]
