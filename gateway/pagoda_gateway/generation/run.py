"""A run is a job being generated: deltas of all its prompts in, one sequence of updates out, and exactly one ending.

It knows nothing of HTTP: its reader may be a connection, a batch, or nobody for a while. Choices are numbered across
prompts: choice i of prompt p has index p * n + i. Nothing runs ahead of the reader: while it does not read, the engine
client merges the deltas that arrive, so a slow reader costs no memory here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeVar

from pagoda_gateway.engine.interface import EngineClient, Generation, Submitting
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.updates import ChoiceReader, Update
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Begun, Delta, FinishReason, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs

logger = logging.getLogger(__name__)


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"  # the engine core did not accept it
    ABANDONED = "abandoned"  # closed before its end: its reader left, or was cancelled


T = TypeVar("T")
Through = Callable[[Submitting], Submitting]
OnEnd = Callable[[Usage, Outcome], None]
OnUpdate = Callable[[Update], None]


class Part:
    """One prompt's generation and its choices. Owned by its run, which submits it before reading it."""

    _generation: Generation

    def __init__(self, record: RequestRecord, choices: Sequence[ChoiceReader]) -> None:
        self.record = record
        self.choices = choices
        self.prompt_logprobs: list[TopLogprobs] = []
        self.num_cached = 0
        self.begun: Begun | None = None
        self.over = False
        self.finished = False
        self._submitted = False
        self._reading: asyncio.Task[list[Delta]] | None = None

    async def submit(self, engine: Submitting) -> None:
        self._generation = await engine.submit(self.record)
        self._submitted = True

    def reading(self) -> asyncio.Task[list[Delta]]:
        """The pending read of its next deltas, for waiting on several parts at once."""
        self._reading = self._reading or asyncio.ensure_future(self._generation.next())
        return self._reading

    async def updates(self) -> list[Update]:
        """Updates since the last call; may be empty.

        Raises:
            PagodaError: the generation failed, or ended before all of its choices did.
        """
        if self._reading is None:
            deltas = await self._generation.next()
        else:
            await asyncio.wait([self._reading])
            deltas, self._reading = self._reading.result(), None
        self.over = not deltas
        if self.over and not self.finished:
            raise PagodaError(ErrorCode.STREAM_INTERRUPTED, "the generation ended early", retry_after_s=1.0)
        updates = [update for delta in deltas if (update := self._read(delta)) is not None]
        if any(update.finish for update in updates):
            self.finished = all(choice.text.finished for choice in self.choices)
            await self._abort_stopped(deltas)
        return updates

    def _read(self, delta: Delta) -> Update | None:
        """None if the choice has ended: the engine core learns of stop strings late."""
        self.begun = self.begun or delta.tokens.begun
        for known in (delta.tokens.begun, delta.usage):
            if known is not None:
                self.num_cached = known.cached_prompt_tokens
        self.prompt_logprobs += delta.tokens.prompt_logprobs or ()
        choice = self.choices[delta.choice]
        if choice.text.finished:
            return None
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            code = delta.error_code or ErrorCode.STREAM_INTERRUPTED
            raise PagodaError(code, delta.error_message or "the request was aborted")
        return choice.read(delta)

    async def _abort_stopped(self, deltas: Sequence[Delta]) -> None:
        """Abort choices that a stop string has just ended here; the engine core still runs them."""
        running = {delta.choice for delta in deltas if delta.finish_reason is None}
        stopped = sorted(i for i in running if self.choices[i].text.finished)
        if stopped:
            await self._generation.abort(stopped)

    async def aclose(self) -> None:
        try:
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.gather(self._reading, return_exceptions=True)
        finally:
            if self._submitted:
                await self._generation.aclose()


class Run:
    """`start` or `attach` it, call `next` until it returns [], and `aclose` it in any case, which calls `on_end` once.
    `on_update` receives every update that is read."""

    def __init__(self, job: Job, text: ModelText, on_end: OnEnd, on_update: OnUpdate | None = None) -> None:
        self.job = job
        self.text = text
        self.fingerprint = ""  # of the engine core's model when it accepted the job
        self.parts = self._new_parts()
        self._needs_usage = job.shown.usage or not job.shown.stream  # comes with the engine core's own ending
        self._on_end = on_end
        self._on_update = on_update
        self._due_at: float | None = None  # by the loop's clock, because the wall clock may jump
        if job.due_at:
            self._due_at = asyncio.get_running_loop().time() + job.due_at - time.time()
        self._outcome = Outcome.ABANDONED
        self._closed = False

    async def start(self, engine: EngineClient, through: Through = lambda taker: taker) -> None:
        """Submit all records; `through` may wrap the engine, for example to record.

        Raises:
            PagodaError: a record was not admitted; the run must still be closed.
        """
        taker = through(engine)
        try:
            await self.in_time(self.attach(taker, engine.load.model_fingerprint))
        except PagodaError as error:
            if error.param != "grammar" or error.code is not ErrorCode.INVALID_ARGUMENT or not self.job.loose_grammar:
                raise
            logger.warning("%s: its tools' schemas make no grammar; arguments may be any JSON object", self.job.id)
            await self._loosen()
            await self.in_time(self.attach(taker, engine.load.model_fingerprint))

    def _new_parts(self) -> list[Part]:
        parts: list[Part] = []
        for i, record in enumerate(self.job.records):
            indices = range(i * record.task.params.n, (i + 1) * record.task.params.n)
            parts.append(Part(record, [ChoiceReader(k, self.text, record, self.job.shown.how) for k in indices]))
        return parts

    async def _loosen(self) -> None:
        """Begin again with the weaker grammar."""
        for part in self.parts:
            await part.aclose()
        self.job = self.job.loosened()
        self.parts = self._new_parts()
        self._outcome = Outcome.ABANDONED

    async def attach(self, taker: Submitting, fingerprint: str) -> None:
        """Submit all records to `taker`, without a second attempt. Raises PagodaError as `start` does."""
        self.fingerprint = fingerprint
        submitting = [asyncio.ensure_future(part.submit(taker)) for part in self.parts]
        try:
            await asyncio.gather(*submitting)
        except Exception as error:
            self._outcome = Outcome.REFUSED if isinstance(error, PagodaError) else Outcome.FAILED
            raise
        finally:
            for task in submitting:
                task.cancel()
            await asyncio.gather(*submitting, return_exceptions=True)

    async def next(self) -> list[Update]:
        """All updates that are available, for one or more choices; [] when every choice has ended.

        Raises:
            PagodaError: a generation failed; the run must still be closed.
        """
        try:
            while waiting := [part for part in self.parts if self._wants_more_of(part)]:
                reading = waiting[0].updates() if len(waiting) == 1 else self._updates_of(waiting)
                if updates := await (reading if self._due_at is None else self.in_time(reading)):
                    if (show := self._on_update) is not None:
                        for update in updates:
                            show(update)
                    return updates
        except Exception:
            self._outcome = Outcome.FAILED
            raise
        self._outcome = Outcome.FINISHED
        return []

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await `work` up to the job's deadline; a result that is ready but read after the deadline is late, too.

        Raises:
            PagodaError: DEADLINE_EXCEEDED.
        """
        try:
            async with asyncio.timeout_at(self._due_at) as deadline:
                result = await work
        except TimeoutError:
            if not deadline.expired():
                raise
        else:
            if self._due_at is None or asyncio.get_running_loop().time() < self._due_at:
                return result
        self._outcome = Outcome.FAILED
        raise PagodaError(ErrorCode.DEADLINE_EXCEEDED, "the request took longer than it was allowed to")

    def _wants_more_of(self, part: Part) -> bool:
        return not part.finished or (self._needs_usage and not part.over)

    async def _updates_of(self, parts: Sequence[Part]) -> list[Update]:
        readings = [part.reading() for part in parts]
        await asyncio.wait(readings, return_when=asyncio.FIRST_COMPLETED)
        arrived = [part for part, reading in zip(parts, readings, strict=True) if reading.done()]
        return [update for part in arrived for update in await part.updates()]

    async def aclose(self) -> None:
        """Abort all generations that still run. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        async with contextlib.AsyncExitStack() as rest:
            rest.callback(lambda: self._on_end(self.usage(), self._outcome))
            for part in self.parts:
                rest.push_async_callback(part.aclose)

    def usage(self) -> Usage:
        """Usage so far."""
        return Usage(
            prompt_tokens=self.job.num_prompt_tokens,
            cached_prompt_tokens=sum(part.num_cached for part in self.parts),
            output_tokens=sum(choice.text.num_tokens for part in self.parts for choice in part.choices),
        )

    def num_reasoning_tokens(self) -> int | None:
        """The count in the output so far; None if it cannot be known exactly."""
        counts = [choice.num_reasoning_tokens for part in self.parts for choice in part.choices]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None
