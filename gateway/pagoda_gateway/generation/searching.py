"""A beam search looks like any generation: it is submitted, gives its deltas, and ends once.

Behind it, every step of every beam is a request of its own for one token, whose prompt is the beam so far; metrics and
log know the search as one. Steps share the blocks of what they have in common as all requests of one salt do, and
survive the loss of a worker as all requests do. They are submitted when the one before them has ended, and none
outlives the search.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from pagoda_gateway.engine.interface import EngineClient, Generation
from pagoda_gateway.engine.whole_request import WholeRequest
from pagoda_gateway.generation.beams import Beam, BeamSearch, Candidates, Ended
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta, FinishReason, RequestRecord, Tokens, Usage

T = TypeVar("T")


class BeamSearching:
    """Implements `Submitting`: a record's `n` is how many beams are kept."""

    def __init__(self, engine: EngineClient, length_penalty: float) -> None:
        self._engine = engine
        self._length_penalty = length_penalty

    async def submit(self, record: RequestRecord, *, counted: bool = True, prior: Sequence[Delta] = ()) -> Generation:
        """The first step is what is admitted. Raises PagodaError, also for `prior`: a search tells all at its end."""
        if prior:
            raise PagodaError(ErrorCode.INTERNAL, "a beam search cannot be gone on with")
        params = record.task.params
        room = params.max_tokens or max(1, self._engine.load.max_model_len - len(record.prompt_token_ids))
        ends = frozenset() if params.ignore_eos else frozenset(record.task.eos_token_ids)
        searched = _Searched(self._engine, record, BeamSearch(params.n, self._length_penalty, ends, room))
        await searched.begin()
        return searched


class _Searched:
    """Implements `Generation`."""

    def __init__(self, engine: EngineClient, record: RequestRecord, search: BeamSearch) -> None:
        self._engine = engine
        self._record = record
        self._search = search
        self._open: dict[int, Generation] = {}
        self._num_submitted = 0
        self._num_cached = 0
        self._searching: asyncio.Task[None] | None = None
        self._told = False
        self._began_at = time.monotonic()

    async def begin(self) -> None:
        try:
            first = await self._submit(self._search.running[0])
        except PagodaError as error:
            self._count(FinishReason.ERROR, error.code)
            raise
        self._searching = asyncio.create_task(self._run(first), name="beam-search")
        self._searching.add_done_callback(self._on_end)

    def _on_end(self, searching: asyncio.Task[None]) -> None:
        error = None if searching.cancelled() else searching.exception()
        if searching.cancelled():
            self._count(FinishReason.ABORT)
        elif error is not None:
            self._count(FinishReason.ERROR, error.code if isinstance(error, PagodaError) else None)
        else:
            at_end = all(one.at_end for one in self._search.best)
            self._count(FinishReason.STOP if at_end else FinishReason.LENGTH)

    def _count(self, outcome: FinishReason, code: ErrorCode | None = None) -> None:
        """Once."""
        total_s = time.monotonic() - self._began_at
        self._engine.count_whole(WholeRequest(self._record, self._usage(), outcome, code, total_s))

    async def next(self) -> list[Delta]:
        if self._searching is None or self._told:
            return []
        await asyncio.wait([self._searching])
        self._searching.result()
        self._told = True
        return self._deltas()

    async def abort(self, choices: Sequence[int] = ()) -> None:
        """Choices are known when all have ended; so only all of them can be stopped."""
        if not choices:
            await self.aclose()

    async def aclose(self) -> None:
        if self._searching is not None:
            self._searching.cancel()
            await asyncio.gather(self._searching, return_exceptions=True)
        for number in list(self._open):
            await self._close(number)

    async def _run(self, first: int) -> None:
        numbers = [first]
        while True:
            self._search.take(await _all(map(self._candidates, numbers)))
            if self._search.done:
                return
            numbers = await _all(map(self._submit, self._search.running))

    async def _submit(self, beam: Beam) -> int:
        """Of a beam's next token; under what number it is open."""
        number = self._num_submitted
        self._num_submitted += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=self._search.num_candidates)
        record = msgspec.structs.replace(
            self._record,
            request_id=f"{self._record.request_id}-{number}",
            prompt_token_ids=[*self._record.prompt_token_ids, *beam.token_ids],
            task=msgspec.structs.replace(self._record.task, params=params),
        )
        self._open[number] = await self._engine.submit(record, counted=False)
        return number

    async def _candidates(self, number: int) -> Candidates:
        """Raises PagodaError when it cannot be computed."""
        found: Candidates = ()
        while deltas := await self._open[number].next():
            for delta in deltas:
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    code = delta.error_code or ErrorCode.STREAM_INTERRUPTED
                    raise PagodaError(code, delta.error_message or "the request was aborted")
                for entry in delta.tokens.logprobs or ():
                    found = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
                if number == 0 and delta.usage is not None:
                    self._num_cached = delta.usage.cached_prompt_tokens
        await self._close(number)
        if not found:
            raise PagodaError(ErrorCode.STREAM_INTERRUPTED, "the generation ended early", retry_after_s=1.0)
        return found

    async def _close(self, number: int) -> None:
        generation = self._open.pop(number, None)
        if generation is not None:
            await generation.aclose()

    def _deltas(self) -> list[Delta]:
        best = self._search.best
        deltas = [self._delta(choice, ended) for choice, ended in enumerate(best)]
        deltas[-1].usage = self._usage()
        return deltas

    def _usage(self) -> Usage:
        """Output only of a search that is done."""
        return Usage(
            prompt_tokens=len(self._record.prompt_token_ids),
            cached_prompt_tokens=self._num_cached,
            output_tokens=sum(len(one.beam.token_ids) for one in self._search.best) if self._search.done else 0,
        )

    def _delta(self, choice: int, ended: Ended) -> Delta:
        token_ids = list(ended.beam.token_ids)
        tokens = Tokens(first_index=0, token_ids=token_ids, stop_token_id=token_ids[-1] if ended.at_end else None)
        reason = FinishReason.STOP if ended.at_end else FinishReason.LENGTH
        return Delta(request_id=self._record.request_id, choice=choice, result=tokens, finish_reason=reason)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, when none of them is under way any more. Raises what the first one raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
