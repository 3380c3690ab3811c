"""Requests know of no engine core: however many there are, a request waits until one takes it, and goes on at any.

`SessionClient` keeps a link to each engine core and multiplexes all requests on them. It knows whether one of them may
be used, and for how long a new request waits for that; the requests themselves are the pool's. One task keeps each
link, another one ticks: it sees silence and tends the pool's deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from pagoda_gateway.engine.link import NOT_CONNECTED, Link, reports_together, together
from pagoda_gateway.engine.pooled_generation import PooledGeneration
from pagoda_gateway.engine.recent import RecentRequests, WholeRequest
from pagoda_gateway.engine.report import EngineReport, Reports
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_gateway.engine.request_pool import RequestPool
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.engine.waits import Absence, Waits
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, Load, RequestRecord
from pagoda_proto.times import LivedClock


class SessionClient:
    """Implements `EngineClient`. Call `start` once inside the loop, and `aclose` at the end."""

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        metrics: GatewayMetrics,
        waits: Waits | None = None,
        *,
        log_requests: bool = True,
    ) -> None:
        self._metrics = metrics
        self._waits = waits or Waits()
        self.clock = LivedClock(self._waits.tick_s, time.monotonic)
        self._absence = Absence(self._waits, self.clock.now())
        self._meter = RequestMeter(metrics, log_requests=log_requests)
        self._pool = RequestPool(self.clock, self._waits, metrics, self._meter, self._absence.retry_after_s)
        silent_s = self._waits.silent_s
        self._links = [Link(each, self.clock, silent_s, self._pool, self._on_change) for each in addresses]
        self._reports = Reports(self._ask_report)
        self._num_lost = 0
        self._usable = asyncio.Event()  # an engine core is connected, and takes new requests
        self._tasks: dict[str, asyncio.Task[None]] = {}
        metrics.watch_engine(lambda: self.load, lambda: self.connected, lambda: self.num_open)

    @property
    def load(self) -> Load:
        """The last word of the engine cores that are connected, or of all; without a connection no workers."""
        return together([link.load for link in self._links if link.connected] or [link.load for link in self._links])

    @property
    def problem(self) -> str:
        """Why no engine core takes requests from here, as the end of a sentence about one; "" if one does."""
        problems = {link.problem for link in self._links}
        return "" if "" in problems else min(problems, key=lambda problem: problem == NOT_CONNECTED)

    @property
    def connected(self) -> bool:
        return any(link.connected for link in self._links)

    @property
    def num_open(self) -> int:
        return self._pool.num_open

    @property
    def recent(self) -> RecentRequests:
        return self._meter.recent

    def count_whole(self, ended: WholeRequest) -> None:
        self._meter.whole(ended)

    async def report(self) -> EngineReport | None:
        """What the engine cores say of their workers, at most `REPORT_AGE_S` old; None where none answers."""
        return await self._reports.latest()

    async def _ask_report(self) -> EngineReport | None:
        reports = await asyncio.gather(*(link.report() for link in self._links))
        return reports_together([report for report in reports if report is not None])

    @property
    def last_progress_at(self) -> float:
        """By `clock`: when a token last came here, or a step of an engine core's last advanced."""
        return max(link.progress.at for link in self._links)

    def dead_tasks(self) -> list[str]:
        """Long-lived tasks that should be running and are not."""
        names = (*(_task_name(number) for number in range(len(self._links))), "engine clock")
        return [name for name in names if name not in self._tasks or self._tasks[name].done()]

    def start(self) -> None:
        for number, link in enumerate(self._links):
            name = _task_name(number)
            self._tasks[name] = asyncio.create_task(link.run(), name=name.replace(" ", "-"))
        self._tasks["engine clock"] = asyncio.create_task(self._keep_ticking(), name="engine-clock")

    async def aclose(self) -> None:
        """End what is open and leave."""
        self.end_all("the gateway is shutting down")
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def end_all(self, why: str) -> None:
        self._pool.fail_all(why)

    async def submit(
        self, record: RequestRecord, *, counted: bool = True, prior: Sequence[Delta] = ()
    ) -> PooledGeneration:
        """Send a record and wait until an engine core took it. `prior` is what came of it before, at another gateway.

        Raises:
            PagodaError: UNAVAILABLE without an engine core, or what the engine core refused it with.
        """
        await self._wait_usable()
        generation = self._pool.open(record, counted=counted, prior=prior)
        try:
            await generation.admitted.wait()
        except asyncio.CancelledError:
            self._pool.release(generation)
            raise
        if generation.request.error is not None and not generation.request.num_output_tokens:
            raise generation.request.error
        return generation

    async def _wait_usable(self) -> None:
        now = self.clock.now()
        refused_at = now + self._absence.submit_wait_s(now)
        while not self._usable.is_set():
            if now >= refused_at:
                self._metrics.refused(ErrorCode.UNAVAILABLE)
                why = f"the engine core {self.problem}"
                raise PagodaError(ErrorCode.UNAVAILABLE, why, retry_after_s=self._absence.retry_after_s(now))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(refused_at - now):
                    await self._usable.wait()
            now = self.clock.now()

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(self._waits.tick_s)
            for link in self._links:
                link.tick()
            self._pool.tend()

    def _on_change(self) -> None:
        num_lost = sum(link.num_lost for link in self._links)
        self._metrics.sessions_lost.inc(num_lost - self._num_lost)
        self._num_lost = num_lost
        if any(link.usable for link in self._links):
            self._absence.end()
            self._usable.set()
        else:
            self._absence.begin(self.clock.now())
            self._usable.clear()


def _task_name(number: int) -> str:
    return f"engine session {number + 1}" if number else "engine session"
