"""Works on one batch: checks it, answers it line by line, and ends it, from whatever state it is in.

Every step can be repeated, because it begins by looking at the stored state. So a step that failed because the store
was unreachable, and a batch whose gateway died, are the same case.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pagoda_gateway.api.error_body import openai_error
from pagoda_gateway.api.errors import internal
from pagoda_gateway.batches import batch as states
from pagoda_gateway.batches import results as written
from pagoda_gateway.batches.batch import Batch, Fault, Status
from pagoda_gateway.batches.batches import Batches, Work
from pagoda_gateway.batches.files import Files
from pagoda_gateway.batches.finishing import write_files
from pagoda_gateway.batches.lines import Checker, Line, LineTooLong, custom_id_of, lines_of
from pagoda_gateway.batches.results import MAX_ANSWER_BYTES, Lost, Result, Results
from pagoda_gateway.store.interface import Unreadable
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

AGAIN = frozenset({ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE, ErrorCode.STREAM_INTERRUPTED})
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This batch was cancelled before this request was executed.")

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Service(Protocol):
    """Answers the lines."""

    def known(self, model: str | None) -> str:
        """The served name. Raises PagodaError MODEL_NOT_FOUND."""
        ...

    async def in_thread(self, num_bytes: int, work: Callable[[], None]) -> None:
        """Do this, away from the event loop if `num_bytes` is large. Raises PagodaError OVERLOADED."""
        ...

    async def answer(self, endpoint: str, line: bytes, owner: str) -> bytes:
        """The answer to a request with the line's body. Raises PagodaError."""
        ...


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Shared by all batches that are worked on here.

    `slots` bounds the lines answered concurrently; `on_result` is called for every line with whether it failed.
    """

    batches: Batches
    files: Files
    service: Service
    slots: asyncio.Semaphore
    max_line_bytes: int
    on_result: Callable[[bool], None] = lambda failed: None


class BatchWork:
    """`run` it until the batch has ended; `look` makes it check the batch's stored state meanwhile."""

    def __init__(self, desk: Desk, work: Work) -> None:
        self._desk = desk
        self._batches = desk.batches
        self._owner = work.owner
        self._id = work.batch_id
        self.changed = asyncio.Event()  # there may be something to look at
        self._stop = asyncio.Event()  # no more lines are to be answered
        self._results: Results | None = None

    async def run(self) -> None:
        while not await _until_there(self._gone_on):
            pass

    async def _gone_on(self) -> bool:
        """Take one step; returns whether none was left."""
        batch = await self._known()
        if batch is None or batch.has_ended():
            logger.info("batch %s is %s", self._id, "gone" if batch is None else batch.status)
            await self._batches.close(self._id)
            return True
        with suppress(Lost):
            await self._step(batch)
        return False

    async def _known(self) -> Batch | None:
        """None if the store has lost it."""
        try:
            return await self._batches.find(self._owner, self._id)
        except PagodaError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return None
            raise

    async def look(self) -> None:
        """Write the progress to the record, and check whether to stop. Raises PagodaError."""
        batch = await self._batches.change(self._owner, self._id, self._told)
        if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS) or self._overdue(batch):
            self._stop.set()

    def _told(self, batch: Batch) -> Batch:
        counts = None if self._results is None else self._results.counts(batch.counts.total)
        return batch if counts is None else states.counted(batch, counts)

    def _overdue(self, batch: Batch) -> bool:
        return self._batches.clock() >= batch.expires_at

    async def _step(self, batch: Batch) -> None:
        if batch.status is Status.FINALIZING:
            await write_files(self._batches.store, self._owner, batch)
            await self._change(lambda batch: states.ended(batch, self._now()))
        elif batch.in_progress_at is None:
            await self._check(batch)
        else:
            await self._answer_all(batch)

    def _now(self) -> float:
        return self._batches.clock()

    async def _change(self, how: Callable[[Batch], Batch]) -> Batch:
        return await self._batches.change(self._owner, self._id, how)

    # Checking

    async def _check(self, batch: Batch) -> None:
        checker = Checker(batch.endpoint, self._desk.service.known)
        try:
            async for lines in self._lines(batch):
                size = sum(len(line.data) for line in lines)
                await self._desk.service.in_thread(size, lambda lines=lines: checker.check(lines))  # type: ignore[misc]
                if checker.full:
                    break
            else:
                checker.end()
        except PagodaError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            checker.faults.append(_input_gone())
        except LineTooLong as error:
            why = f"a line has at most {self._desk.max_line_bytes} bytes"
            checker.faults.append(Fault("line_too_long", why, error.number))
        if checker.faults:
            await self._change(lambda batch: states.refused(batch, checker.faults, self._now()))
        else:
            logger.info("batch %s: %d lines", batch.id, checker.total)
            await self._change(lambda batch: states.begun(batch, checker.model, checker.total, self._now()))

    async def _lines(self, batch: Batch) -> AsyncIterator[list[Line]]:
        info = await self._desk.files.find(self._owner, batch.input_file_id)
        async for lines in lines_of(self._desk.files.content(info), self._desk.max_line_bytes):
            yield lines

    # Answering

    async def _answer_all(self, batch: Batch) -> None:
        self._results = results = Results(self._batches.store, states.results_log(batch.id))
        await results.load()
        if results.num_lines:
            logger.info("batch %s: resuming, %d of %d lines are done", batch.id, results.num_lines, batch.counts.total)
        ending, faults = Status.COMPLETED, list[Fault]()
        try:
            if not self._overdue(batch) and batch.status is Status.IN_PROGRESS:
                await self._answer_lines(batch, results)
            if results.num_lines < batch.counts.total:
                ending = await self._give_up_rest(results)
        except PagodaError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            ending, faults = Status.FAILED, [_input_gone()]
        counts = results.counts(batch.counts.total)
        await self._change(lambda batch: states.finalizing(batch, ending, counts, self._now(), faults))

    async def _answer_lines(self, batch: Batch, results: Results) -> None:
        """Answer lines until all are answered or it is to stop; lines in progress are then abandoned."""
        stopping = asyncio.create_task(self._stop.wait())
        running: set[asyncio.Task[None]] = set()
        try:
            async with aclosing(self._left(batch, results)) as lines:
                async for line in lines:
                    if not await self._slot(stopping):
                        return
                    running = {task for task in running if not _ended_well(task)}
                    running.add(self._begin(batch, line, results))
            while running and not stopping.done():
                await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                running = {task for task in running if not _ended_well(task)}
        finally:
            for task in (*running, stopping):
                task.cancel()
            await asyncio.gather(*running, stopping, return_exceptions=True)

    def _begin(self, batch: Batch, line: Line, results: Results) -> asyncio.Task[None]:
        """Holds the slot until the result is stored, which also bounds results that are not stored yet."""
        task = asyncio.create_task(self._answer_one(batch, line, results))
        task.add_done_callback(lambda _: self._desk.slots.release())
        return task

    async def _left(self, batch: Batch, results: Results) -> AsyncGenerator[Line, None]:
        async for lines in self._lines(batch):
            for line in lines:
                if not results.has(line.number):
                    yield line

    async def _slot(self, stopping: asyncio.Task[bool]) -> bool:
        """Wait for one of the slots; False if it is to stop instead."""
        taking = asyncio.create_task(self._desk.slots.acquire())
        try:
            await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _put_back(taking, self._desk.slots)
            raise
        if stopping.done():
            await _put_back(taking, self._desk.slots)
            return False
        return True

    async def _answer_one(self, batch: Batch, line: Line, results: Results) -> None:
        result = await self._result(batch, line)
        await _until_there(lambda: results.write([result]))
        self._desk.on_result(result.failed)

    async def _result(self, batch: Batch, line: Line) -> Result:
        custom_id, request_id = custom_id_of(line), f"req-{secrets.token_hex(16)}"
        try:
            answer = await _until_there(lambda: self._desk.service.answer(batch.endpoint, line.data, self._owner))
            if len(answer) > MAX_ANSWER_BYTES:
                why = f"the answer has {len(answer)} bytes; in a batch it may have {MAX_ANSWER_BYTES}"
                raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, why)
        except PagodaError as error:
            body = openai_error(error)
            return written.refused(line.number, custom_id, request_id, error.status.http, body)
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this line and no other
            failure = internal(error, {"state": {"request_id": request_id}})
            return written.refused(line.number, custom_id, request_id, failure.status.http, openai_error(failure))
        return written.answered(line.number, custom_id, request_id, answer)

    async def _give_up_rest(self, results: Results) -> Status:
        """Give every line without an answer an error that says why."""
        batch = await self._batches.find(self._owner, self._id)
        cancelled = batch.status is Status.CANCELLING
        if not cancelled and not self._overdue(batch):
            raise PagodaError(ErrorCode.UNAVAILABLE, "another gateway is working on this batch")
        code, message = CANCELLED if cancelled else EXPIRED
        async for lines in self._lines(batch):
            left = [line for line in lines if not results.has(line.number)]
            if left:
                given_up = [written.given_up(line.number, custom_id_of(line), code, message) for line in left]
                await results.write(given_up)
        return Status.CANCELLED if cancelled else Status.EXPIRED


def _ended_well(task: asyncio.Task[None]) -> bool:
    """False while the task runs. Raises what it raised."""
    if not task.done():
        return False
    task.result()
    return True


async def _put_back(taking: asyncio.Task[bool], slots: asyncio.Semaphore) -> None:
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    if not taking.cancelled():
        slots.release()


async def _until_there(call: Callable[[], Awaitable[T]]) -> T:
    """Retry with back-off while the server is overloaded or unavailable, or the stream breaks."""
    again_s = times.BATCH_AGAIN_S
    while True:
        try:
            return await call()
        except PagodaError as error:
            if error.code not in AGAIN or isinstance(error, Unreadable):
                raise
            await asyncio.sleep(max(error.retry_after_s, again_s))
            again_s = min(2 * again_s, times.BATCH_AGAIN_MOST_S)


def _input_gone() -> Fault:
    return Fault("input_file_gone", "the input file was deleted or has expired", param="input_file_id")
