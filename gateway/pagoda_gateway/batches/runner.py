"""A gateway looks for batches that no gateway works on, and works on a few of them at once, tenants in turn.

A gateway that works on a batch holds its claim and keeps renewing it; the claim of one that died expires.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagoda_gateway.batches.batches import Work, claim_of
from pagoda_gateway.batches.work import BatchWork, Desk
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

MAX_AT_ONCE = 8

logger = logging.getLogger(__name__)


def in_turn(open_work: Sequence[Work], running: Sequence[Work]) -> Iterator[Work]:
    """Batches that are not running: those of the tenant with the fewest running first, then the oldest."""
    count = Counter(work.owner for work in running)
    ids = {work.batch_id for work in running}
    waiting = [work for work in open_work if work.batch_id not in ids]
    while waiting:
        found = min(waiting, key=lambda work: count[work.owner])
        waiting.remove(found)
        count[found.owner] += 1
        yield found


class _Running(NamedTuple):
    work: Work
    batch_work: BatchWork
    task: asyncio.Task[None]


class BatchRunner:
    """`start` it in the event loop, and `aclose` it, which releases its claims to others."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._store = desk.batches.store
        self._holder = secrets.token_hex(16)
        self._running: dict[str, _Running] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="batches")

    async def aclose(self) -> None:
        """Leave running batches in their current state. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        changed = self._desk.batches.changed
        while True:
            changed.clear()
            try:
                await self._take()
            except PagodaError as error:
                logger.debug("cannot look for batches: %s", error.message)
            except Exception:
                logger.exception("looking for batches failed")
            if await _set_within(changed, times.BATCH_LOOK_S):
                for running in self._running.values():
                    running.batch_work.changed.set()

    async def _take(self) -> None:
        """Begin batches that no gateway works on. Raises PagodaError UNAVAILABLE."""
        running = [running.work for running in self._running.values()]
        for work in in_turn(await self._desk.batches.open(), running):
            if len(self._running) >= MAX_AT_ONCE:
                return
            if self._is_ours(work) and await self._claim(work):
                batch_work = BatchWork(self._desk, work)
                task = asyncio.create_task(self._work_on(work, batch_work), name=work.batch_id)
                self._running[work.batch_id] = _Running(work, batch_work, task)
                task.add_done_callback(lambda ended: self._running.pop(ended.get_name()))

    async def _claim(self, work: Work) -> bool:
        return await self._store.claim(claim_of(work.batch_id), self._holder, times.BATCH_LEASE_S)

    def _is_ours(self, work: Work) -> bool:
        """Whether its model is served here. An expired batch suits any gateway, because no more lines are answered."""
        if not work.model or self._desk.batches.clock() >= work.expires_at:
            return True
        try:
            return self._desk.service.known(work.model) == work.model
        except PagodaError:
            return False

    async def _work_on(self, work: Work, batch_work: BatchWork) -> None:
        """After an unexpected error the claim stays, so that no gateway retries at once."""
        failed = False
        parts = [asyncio.create_task(batch_work.run()), asyncio.create_task(self._hold(work, batch_work))]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            for ended in await asyncio.gather(*parts, return_exceptions=True):
                if isinstance(ended, Exception):
                    failed = True
                    logger.error("batch %s: work on it failed", work.batch_id, exc_info=ended)
            if not failed:
                await self._release(work)

    async def _release(self, work: Work) -> None:
        try:
            await self._store.release(claim_of(work.batch_id), self._holder)
        except PagodaError as error:
            logger.debug("the claim of %s runs out by itself: %s", work.batch_id, error.message)

    async def _hold(self, work: Work, batch_work: BatchWork) -> None:
        """Renew the claim until another gateway has it."""
        while True:
            try:
                if not await self._claim(work):
                    logger.warning("batch %s has been taken over by another gateway", work.batch_id)
                    return
                await batch_work.look()
            except PagodaError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    return
            await _set_within(batch_work.changed, times.BATCH_BEAT_S)
            batch_work.changed.clear()


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
