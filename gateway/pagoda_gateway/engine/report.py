"""What engine cores say of themselves and their workers when they are asked; however many ask, that is twice a second.

Whoever wants to look gets the last answer, or a new one if that is old. Without an engine core there is none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

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


def joined(reports: Sequence[EngineReport | None]) -> EngineReport | None:
    """One of several, in which a worker of the second engine core is called `2/worker-0`; None of none."""
    if len(reports) == 1:
        return reports[0]
    known = [(number, report) for number, report in enumerate(reports, 1) if report is not None]
    if not known:
        return None
    totals: Counter[str] = Counter()
    for _, report in known:
        totals.update(report.totals)
    workers = [
        msgspec.structs.replace(worker, worker_id=f"{number}/{worker.worker_id}")
        for number, report in known
        for worker in report.workers
    ]
    return EngineReport(at_s=max(report.at_s for _, report in known), workers=tuple(workers), totals=dict(totals))


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
