"""Schemas of the answers of embedding and scoring models, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, RootModel

from pagoda_gateway.api.answer_schemas import Answered


class ReadUsage(Answered):
    prompt_tokens: int
    total_tokens: int


class Listed(Answered):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: ReadUsage


class Embedding(Answered):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingsAnswer(Listed):
    """Base64 encodes little-endian float32."""

    data: list[Embedding]


class PooledData(Answered):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingAnswer(Listed):
    data: list[PooledData]


class Classification(Answered):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Listed):
    data: list[Classification]


class Score(Answered):
    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Listed):
    data: list[Score]


class RankedDocument(Answered):
    text: str


class Ranked(Answered):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(Answered):
    """For a body with `texts`, a list of {index, score, text} instead."""

    id: str
    model: str
    usage: ReadUsage
    results: list[Ranked]
    meta: dict[str, Any] | None = None


class RankedText(Answered):
    index: int
    score: float
    text: str | None = None


class Vectors(RootModel[list[list[float]]]):
    """The answer of /embed."""

    model_config = ConfigDict(strict=True)


class RerankAnswers(RootModel[RerankAnswer | list[RankedText]]):
    """Which one depends on the body."""
