"""Offline use of embedding and scoring models: records in, vectors and scores out, in the field's usual classes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from pagoda.offline.local import Local, Prompt, as_list, content_of, failure
from pagoda.processes.garbage import fewer_collections
from pagoda_gateway.pooling.asked import Asked, Reading, check_scores
from pagoda_gateway.pooling.vectors import cosine, floats, of_tokens
from pagoda_gateway.text.reading import Pair
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.pooling.kinds import CLASSIFY
from pagoda_proto.pooling.params import EMBED, GENERATES, TOKEN_EMBED, PoolingParams, check_pooling
from pagoda_proto.records import Delta, FinishReason, Pool, RequestRecord

T = TypeVar("T")


@dataclass(frozen=True)
class PoolingOutput:
    """The numbers of a prompt; with `token_embed`, those of each token."""

    data: list[float] | list[list[float]]


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt and its output."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class ReadRequest:
    """A pooling request in this process; see `OfflineRequest`."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.error: PagodaError | None = None
        self.data = b""
        self.num_cached = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended or self.error is not None

    @property
    def output(self) -> ReadRequest:
        return self

    def take(self, delta: Delta) -> None:
        self.data = delta.pooled or self.data
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.error = PagodaError(delta.error_code or ErrorCode.CANCELLED, delta.error_message or "aborted")
        if delta.usage is not None:
            self._ended, self.num_cached = True, delta.usage.cached_prompt_tokens

    def shown(self, outputs: T) -> PoolingRequestOutput[T]:
        record = self.record
        return PoolingRequestOutput(record.request_id, outputs, record.prompt_token_ids, self.num_cached)


@dataclass(frozen=True)
class Reads:
    """Reads prompts with one model. `run` runs requests to completion."""

    local: Local
    run: Callable[[list[ReadRequest]], list[ReadRequest]]

    def encode(
        self, prompts: Any, params: PoolingParams | Sequence[PoolingParams] | None, task: str | None, keep: int | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        given = as_list(prompts)
        if not self.local.readings.outputs:
            raise InvalidParams([GENERATES])
        params = PoolingParams(output=task or self.local.text.reading.output) if params is None else params
        several = [params] * len(given) if isinstance(params, PoolingParams) else list(params)
        if len(several) != len(given):
            message = f"must be one for all prompts or one for each, got {len(several)} for {len(given)}"
            raise InvalidParams([Problem("pooling_params", message)])
        several = [_for_task(one, task) for one in several]
        done = self.run(self._opened(given, several, keep))
        return [one.shown(PoolingOutput(self._data(one, how))) for one, how in zip(done, several, strict=True)]

    def _data(self, one: ReadRequest, params: PoolingParams) -> list[float] | list[list[float]]:
        if params.output != TOKEN_EMBED:
            return floats(one.data)
        late = self.local.text.reading.late
        vectors = of_tokens(one.data, one.record.prompt_token_ids, None if late is None else late.marks)
        return [floats(vector) for vector in vectors]

    def embed(
        self, prompts: Any, params: PoolingParams | None, keep: int | None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        given = as_list(prompts)
        if params is not None and params.output != EMBED:
            message = f"embed makes one vector of each prompt; use encode for {params.output}"
            raise InvalidParams([Problem("pooling_params", message)])
        done = self.run(self._opened(given, [params or PoolingParams()] * len(given), keep))
        return [one.shown(EmbeddingOutput(floats(one.data))) for one in done]

    def classify(
        self, prompts: Any, activate: bool | None, keep: int | None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        given = as_list(prompts)
        asked = [PoolingParams(output=CLASSIFY, activate=activate)] * len(given)
        return [one.shown(ClassificationOutput(floats(one.data))) for one in self.run(self._opened(given, asked, keep))]

    def score(self, first: str | Sequence[str], second: str | Sequence[str], keep: int | None) -> list[Any]:
        """One text against several, or two equally long lists pairwise."""
        queries, documents = ([one] if isinstance(one, str) else list(one) for one in (first, second))
        if len(queries) not in (1, len(documents)):
            message = f"must have one text or as many as data_2 ({len(documents)}), got {len(queries)}"
            raise InvalidParams([Problem("data_1", message)])
        check_scores(self.local.text.reading, Asked(param="data_2", pooling=PoolingParams()))
        queries *= len(documents) if len(queries) == 1 else 1
        output = self.local.text.reading.of_pairs
        if not output:
            return self._alike(queries, documents, keep)
        pairs = list(zip(queries, documents, strict=True))
        done = self.run(self._opened(pairs, [PoolingParams(output=output)] * len(pairs), keep))
        return [one.shown(ScoringOutput(floats(one.data)[0])) for one in done]

    def _alike(self, queries: Sequence[str], documents: Sequence[str], keep: int | None) -> list[Any]:
        texts = list(dict.fromkeys([*queries, *documents]))
        asked = [PoolingParams(output=EMBED, normalize=True)] * len(texts)
        done = dict(zip(texts, self.run(self._opened(texts, asked, keep)), strict=True))
        pairs = [(done[query], done[document]) for query, document in zip(queries, documents, strict=True)]
        return [other.shown(ScoringOutput(cosine(floats(one.data), floats(other.data)))) for one, other in pairs]

    @fewer_collections()
    def _opened(
        self, given: Sequence[Prompt | Pair], params: Sequence[PoolingParams], keep: int | None
    ) -> list[ReadRequest]:
        opened, errors = [], {}
        checked = cache(partial(self._checked, keep))
        for index, (prompt, one) in enumerate(zip(given, params, strict=True)):
            try:
                opened.append(self._open(prompt, checked(one)))
            except PagodaError as error:
                errors[index] = error
        if errors:
            raise failure(errors)
        return opened

    def _checked(self, keep: int | None, params: PoolingParams) -> Reading:
        asked = Asked(param="the prompt", pooling=params, keep=keep)
        return Reading.checked(self.local.text, self.local.limits, asked)

    def _open(self, prompt: Prompt | Pair, reading: Reading) -> ReadRequest:
        """Raises PagodaError if the prompt or the parameters do not fit the model."""
        local = self.local
        given = prompt if isinstance(prompt, tuple) else content_of(prompt)
        tokens = reading.ids(given) if isinstance(given, list) else reading.tokens(given)
        params = reading.params(given, tokens)
        check_pooling(params, tokens.token_ids, local.limits, local.readings)
        record = RequestRecord(
            request_id=secrets.token_hex(16), prompt_token_ids=tokens.token_ids, task=Pool(pooling=params)
        )
        return ReadRequest(record)


def _for_task(params: PoolingParams, task: str | None) -> PoolingParams:
    """Raises InvalidParams if `params` state another output; the default one is not stated."""
    if task is None or params.output == task:
        return params
    if params.output != EMBED:
        message = f"is {task[:64]!a}, but the output in pooling_params is {params.output}"
        raise InvalidParams([Problem("pooling_task", message)])
    return replace(params, output=task)
