"""What an engine core says of itself and its workers when it is asked; however many ask, it is asked twice a second.

Whoever wants to look gets the last answer, or a new one if that is old. Without an engine core there is none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from pagoda_proto import times


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A life of a worker, field for field as `Worker` in engine.proto; of its process, nothing."""

    worker_id: str
    state: str
    epoch: int
    device: str
    num_blocks: int
    num_free_blocks: int
    num_rows: int
    steps_done: int
    rss_bytes: int


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """`totals` are the numbers of `GetStatsResponse` by name; `at_s` is the gateway's monotonic clock then."""

    at_s: float
    workers: tuple[WorkerReport, ...]
    totals: dict[str, int]


Ask = Callable[[], Awaitable[EngineReport | None]]


class Reports:
    """`ask` is called by one task at a time, and not again before its answer is `REPORT_AGE_S` old."""

    def __init__(self, ask: Ask, now: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._now = now
        self._last: EngineReport | None = None
        self._asked_at = -float("inf")
        self._asking = asyncio.Lock()

    async def latest(self) -> EngineReport | None:
        async with self._asking:
            if self._now() - self._asked_at >= times.REPORT_AGE_S:
                self._last = await self._ask()
                self._asked_at = self._now()
            return self._last
