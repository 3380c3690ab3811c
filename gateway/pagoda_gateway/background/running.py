"""One response that runs here, and what of it is in the store: room is taken before anything is written.

Where there is none it fails, and what is kept as its end takes none: it has no output, and is less than the job that
goes. Those who follow it here are told all that there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from pagoda_gateway.api.encoding import encoded, event
from pagoda_gateway.background.live import LiveEvents
from pagoda_gateway.dialects.responses import telling_of
from pagoda_gateway.dialects.responses_events import AlreadyTold, Told
from pagoda_gateway.generation.job import Job
from pagoda_gateway.http.memory import Holding
from pagoda_gateway.keys.charge import Charge
from pagoda_gateway.store.interface import Conflict
from pagoda_gateway.store.response_logs import new_content
from pagoda_gateway.store.responses import Kept, KeptResponses
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Usage

NO_ROOM = (ErrorCode.RATE_LIMITED, ErrorCode.REQUEST_TOO_LARGE)  # for what a tenant keeps


class Running:
    def __init__(self, job: Job, kept: KeptResponses, known: AlreadyTold, holding: Holding, charge: Charge) -> None:
        self.job = job
        self.charge = charge
        self.live = LiveEvents(known.num_events)
        self.telling = telling_of(job, known)
        self.holding = holding
        self.cancelled = False
        self.failure: PagodaError | None = None
        self.deleted = False
        self.begun = False  # its task, which looks itself what was wanted before that
        self.ending = False  # it is generated; its end is not disturbed
        self.task: asyncio.Task[None] | None = None
        self.usage = Usage(prompt_tokens=0)
        self._kept = kept
        self._told: list[bytes] = []  # and not known to be in the store
        self._news = asyncio.Event()  # there is something told
        self._unsure = False  # whether all that was written last is in the store
        self._room = 0  # bytes that it may write
        self._contents: set[str] = set()  # under which its end may be in the store
        self._short: bytes | None = None  # what is kept as its end where that had no room ..
        self._last: bytes | None = None  # .. and its last event, for those who follow it here

    # What becomes of it

    def cancel(self) -> None:
        if self._is_open():
            self.cancelled = True
            self._stop()

    def fail(self, error: PagodaError) -> None:
        if self._is_open():
            self.failure = error
            self._stop()

    def drop(self) -> None:
        """There is no such response any more."""
        self.deleted = True
        if not self.ending:
            self._stop()

    def _is_open(self) -> bool:
        return not (self.ending or self.cancelled or self.deleted) and self.failure is None

    def _stop(self) -> None:
        if self.task is not None and self.begun:  # one that is cancelled before its first step never takes it
            self.task.cancel()

    # What it says

    def tell(self, said: Told) -> None:
        """One that was not asked for as a stream has no followers."""
        if self.job.shown.stream:
            self._told.append(event(said, said["type"]))
            self._news.set()

    async def keep_writing(self) -> None:
        """What it tells, as it comes. Where another gateway has told otherwise, this one stops."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._write()
            except PagodaError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    return self.drop()
                if error.code in NO_ROOM:
                    return self.fail(error)
                await asyncio.sleep(times.STORE_REST_S)
                self._news.set()
            except Conflict:
                return self._stop()
            await asyncio.sleep(times.RESPONSE_WRITE_S)

    async def _write(self) -> None:
        """Have in the store what was told. Raises Conflict, and PagodaError."""
        await self._make_sure()
        if told := list(self._told):
            num_bytes = sum(map(len, told))
            await self._make_room(num_bytes)
            self._room -= num_bytes
            self._unsure = True
            await self._kept.add_events(self.job.id, told, self.live.end)
            self._written(len(told))

    async def _make_sure(self) -> None:
        if self._unsure:
            self._written(await self._kept.num_events(self.job.id) - self.live.end)

    async def _make_room(self, num_bytes: int) -> None:
        """Raises PagodaError, one of NO_ROOM where there is none."""
        if num_bytes > self._room and self._short is None:
            self._room += await self._kept.reserve(self.job.id, self.job.owner, num_bytes - self._room)

    def _written(self, num_events: int) -> None:
        """So many of what was told are in the store. Raises Conflict where it has others than these."""
        if not 0 <= num_events <= len(self._told):
            raise Conflict
        written = self._told[:num_events]
        if written and self._last is not None:
            written[-1] = self._last
        self.live.add(written)
        del self._told[:num_events]
        self._unsure = False

    # How it ends

    async def end(self, last: Iterator[Told]) -> bool:
        """Keep its end, however long the store is gone. False where it has ended elsewhere, or is deleted. Raises
        Conflict."""
        told = False
        while True:
            try:
                _, kept = await self._kept.find(self.job.id, self.job.owner)
                if kept.ended:
                    return await self._was_ended(kept)
                if not told:
                    for said in self.telling.cancel(self.usage) if kept.cancelled and not self.cancelled else last:
                        self.tell(said)
                    told = True
                await self._keep_end()
                self.charge.count(self.usage)  # once, by whoever wrote the end
                return True
            except PagodaError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    self.drop()
                    return False
                if error.code in NO_ROOM:
                    self._cut_short(error)
                else:
                    await asyncio.sleep(times.STORE_REST_S)

    async def _was_ended(self, kept: Kept) -> bool:
        """Whether it was this gateway, that was not told so."""
        if kept.content not in self._contents:
            return False
        await self._kept.close(self.job.id)
        self.charge.count(self.usage)
        return True

    async def _keep_end(self) -> None:
        """With what is told and not written yet. Raises Conflict where it has ended elsewhere, and PagodaError."""
        response = self._short or encoded(self.telling.response)
        await self._make_sure()
        await self._make_room(sum(map(len, self._told)) + len(response))
        await self._write()
        record, kept = await self._kept.find(self.job.id, self.job.owner)
        if kept.ended:
            raise Conflict
        self._contents.add(content := new_content())
        await self._kept.end(record, kept, response, content)

    def _cut_short(self, error: PagodaError) -> None:
        """How it ends finds no room. What nobody was shown yet is in the last event that followers here are told."""
        telling = self.telling
        telling.take_back(len(self._told))
        self._told.clear()
        is_cancelled = telling.response["status"] == "cancelled"
        (said,) = telling.cancel(self.usage) if is_cancelled else telling.fail(error, self.usage)
        if self.job.shown.stream:
            self._last = event(said, said["type"])
        response = {**telling.response, "output": []}
        self.tell({**said, "response": response})
        self._short = encoded(response)
