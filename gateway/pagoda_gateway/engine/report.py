"""Engine cores' reports on themselves and their workers, asked for at most twice a second, however many clients look.

A reader gets the last report, or a new one if that is old. Without an engine core there is none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from pagoda_proto import times


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a worker, field for field as `Worker` in engine.proto, without the fields about its process."""

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
    """`totals` are the counters of `GetStatsResponse` by name; `at_s` is when it was made, by the gateway's monotonic
    clock."""

    at_s: float
    workers: tuple[WorkerReport, ...]
    totals: dict[str, int]


def joined(reports: Sequence[EngineReport | None]) -> EngineReport | None:
    """Merge reports; a worker of the second engine core is called `2/worker-0`. None if there is no report."""
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
    """Calls `ask` from one task at a time, and not again before `REPORT_AGE_S` have passed."""

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
