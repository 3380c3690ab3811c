"""Stored batches: a record owned by the tenant, and a record of open work, which has no owner.

A change applies to the stored record and is retried if another writer changed that meanwhile, so no change is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from pagoda_gateway.batches import batch as states
from pagoda_gateway.batches.batch import Batch
from pagoda_gateway.batches.files import not_found
from pagoda_gateway.store.interface import ABSENT, MAX_PAGE_RECORDS, Conflict, Record, Store, Unreadable, decoded
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

BATCHES, OPEN = "batches", "open_batches"
MAX_OPEN = MAX_PAGE_RECORDS
MAX_OPEN_OF_ONE = MAX_OPEN // 2


class Work(NamedTuple):
    """A batch that has not ended. `model` is "" until its input has been read."""

    batch_id: str
    owner: str
    model: str
    expires_at: int


class BatchPage(NamedTuple):
    batches: list[Batch]
    more: bool


class Batches:
    """`changed` wakes the runner in this process when there is new work. `clock` returns Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.clock = clock
        self.changed = asyncio.Event()

    async def add(self, owner: str, batch: Batch) -> None:
        """Raises PagodaError if too many are open: OVERLOADED, or RATE_LIMITED if they are this owner's."""
        records = [record async for record in self._open_records()]
        if len(records) >= MAX_OPEN:
            message = f"{MAX_OPEN} batches are open here; try again when some have ended"
            raise PagodaError(ErrorCode.OVERLOADED, message, retry_after_s=60.0)
        if sum(work.owner == owner for work in _works(records)) >= MAX_OPEN_OF_ONE:
            message = f"{MAX_OPEN_OF_ONE} batches of yours are open; try again when some have ended"
            raise PagodaError(ErrorCode.RATE_LIMITED, message, retry_after_s=60.0)
        # Runners look for open work, so that record is written first; the claim keeps them away until the batch exists.
        await self.store.claim(claim_of(batch.id), batch.id, times.BATCH_LEASE_S)
        await self._put_work(owner, batch)
        await self.store.put(BATCHES, batch.id, _written(batch), owner=owner, expect=ABSENT)
        await self.store.release(claim_of(batch.id), batch.id)
        self.changed.set()

    async def _put_work(self, owner: str, batch: Batch) -> None:
        work = Work(batch.id, owner, batch.model, batch.expires_at)
        await self.store.put(OPEN, batch.id, msgspec.json.encode(work))

    async def open(self) -> list[Work]:
        """Open work, the oldest first; records that cannot be read are skipped."""
        return _works([record async for record in self._open_records()])

    async def _open_records(self) -> AsyncIterator[Record]:
        """All records, including those that cannot be read, which count too."""
        after = None
        while True:
            page = await self.store.page(OPEN, "", limit=MAX_PAGE_RECORDS, after=after, newest_first=False)
            for record in page.records:
                after = record.position
                yield record
            if not page.more:
                return

    async def find(self, owner: str, batch_id: str) -> Batch:
        """Raises PagodaError NOT_FOUND."""
        return _read(await self._record(owner, batch_id))

    async def page(self, owner: str, *, limit: int, after: str | None) -> BatchPage:
        """The newest first. Raises PagodaError NOT_FOUND if there is no batch `after`."""
        reached = None if after is None else (await self._record(owner, after)).position
        found: list[Record] = []
        while True:
            page = await self.store.page(BATCHES, owner, limit=limit - len(found), after=reached)
            found += page.records
            if len(found) == limit or not page.more:
                return BatchPage([_read(record) for record in found], page.more)
            reached = found[-1].position

    async def change(self, owner: str, batch_id: str, how: Callable[[Batch], Batch]) -> Batch:
        """Apply `how` and return the result. Raises PagodaError NOT_FOUND, or what `how` raises."""
        while True:
            record = await self._record(owner, batch_id)
            known = _read(record)
            batch = how(known)
            if batch == known:
                return batch
            expires_at = self.clock() + times.KEPT_S if batch.has_ended() else None
            try:
                await self.store.put(
                    BATCHES, batch_id, _written(batch), owner=owner, expect=record.version, expires_at=expires_at
                )
            except Conflict:
                continue
            if batch.model != known.model:
                await self._put_work(owner, batch)
            return batch

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Raises PagodaError if there is no such batch, or it is too late."""
        batch = await self.change(owner, batch_id, lambda batch: states.cancelling(batch, self.clock()))
        self.changed.set()
        return batch

    async def close(self, batch_id: str) -> None:
        """Remove the results and the open work of a batch that has ended."""
        await self.store.drop(states.results_log(batch_id))
        await self.store.delete(OPEN, batch_id)

    async def _record(self, owner: str, batch_id: str) -> Record:
        record = await self.store.get(BATCHES, batch_id)
        if record is None or record.owner != owner:
            raise not_found("batch", batch_id)
        return record


def claim_of(batch_id: str) -> str:
    return f"batch.{batch_id}"


def _works(records: Iterable[Record]) -> list[Work]:
    found = []
    for record in records:
        with suppress(Unreadable):
            found.append(decoded(record.key, record.value, Work))
    return found


def _written(batch: Batch) -> bytes:
    return msgspec.json.encode(batch)


def _read(record: Record) -> Batch:
    return decoded(record.key, record.value, Batch)
