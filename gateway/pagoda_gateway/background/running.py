"""One response that runs here, and how much of it is in the store: room is reserved before anything is written.

If there is no room, the response fails, and its stored end needs none: it has no output, and is smaller than the job
that it replaces. Clients that follow it here still get all of the output.
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

NO_ROOM = (ErrorCode.RATE_LIMITED, ErrorCode.REQUEST_TOO_LARGE)  # in what the tenant may keep


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
        self.begun = False  # whether the task runs yet; it checks for itself what was asked before that
        self.ending = False  # generation is over; the end is not to be interrupted
        self.task: asyncio.Task[None] | None = None
        self.usage = Usage(prompt_tokens=0)
        self._kept = kept
        self._told: list[bytes] = []  # events that are not known to be in the store
        self._news = asyncio.Event()  # set when events are added
        self._unsure = False  # the last write may or may not have reached the store
        self._room = 0  # bytes it may still write
        self._contents: set[str] = set()  # names under which its end may be in the store
        self._short: bytes | None = None  # the object to store if the full one has no room ..
        self._last: bytes | None = None  # .. and its last event, for clients that follow it here

    # Ending it early

    def cancel(self) -> None:
        if self._is_open():
            self.cancelled = True
            self._stop()

    def fail(self, error: PagodaError) -> None:
        if self._is_open():
            self.failure = error
            self._stop()

    def drop(self) -> None:
        """The response was deleted."""
        self.deleted = True
        if not self.ending:
            self._stop()

    def _is_open(self) -> bool:
        return not (self.ending or self.cancelled or self.deleted) and self.failure is None

    def _stop(self) -> None:
        if self.task is not None and self.begun:  # a task cancelled before its first step would never run
            self.task.cancel()

    # Its events

    def tell(self, said: Told) -> None:
        """Queue an event, if the response was requested as a stream; otherwise nobody can follow it."""
        if self.job.shown.stream:
            self._told.append(event(said, said["type"]))
            self._news.set()

    async def keep_writing(self) -> None:
        """Write events to the store as they come. Stops the run if another gateway has written others."""
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
        """Write all queued events to the store. Raises Conflict and PagodaError."""
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
        """Raises PagodaError, with one of NO_ROOM if there is no room."""
        if num_bytes > self._room and self._short is None:
            self._room += await self._kept.reserve(self.job.id, self.job.owner, num_bytes - self._room)

    def _written(self, num_events: int) -> None:
        """The store has the first `num_events` of the queue. Raises Conflict if it has other events than these."""
        if not 0 <= num_events <= len(self._told):
            raise Conflict
        written = self._told[:num_events]
        if written and self._last is not None:
            written[-1] = self._last
        self.live.add(written)
        del self._told[:num_events]
        self._unsure = False

    # Its end

    async def end(self, last: Iterator[Told]) -> bool:
        """Store the end, however long the store is unreachable. False if it has ended elsewhere or was deleted. Raises
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
                self.charge.count(self.usage)  # once, by the gateway that wrote the end
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
        """Whether this gateway wrote the end, in a write whose outcome it did not learn."""
        if kept.content not in self._contents:
            return False
        await self._kept.close(self.job.id)
        self.charge.count(self.usage)
        return True

    async def _keep_end(self) -> None:
        """Write the queued events and the end. Raises PagodaError, and Conflict if it has ended elsewhere."""
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
        """Shorten the end, which has no room. Output that nobody has seen yet is in the last event sent to followers
        here."""
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
