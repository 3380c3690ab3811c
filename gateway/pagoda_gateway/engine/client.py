"""The gateway's client of all engine cores. The pool owns requests, the links own sessions; it knows which are usable.

`SessionClient` has a link to each engine core and multiplexes all requests on their sessions. It reports on them as
one: it is connected if any of them is, and makes progress if any of them does. One task ticks for all: it detects
silence and enforces the pool's deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from pagoda_gateway.engine.cores import merged
from pagoda_gateway.engine.link import NOT_CONNECTED, EngineLink
from pagoda_gateway.engine.pooled_generation import PooledGeneration
from pagoda_gateway.engine.recent import RecentRequests
from pagoda_gateway.engine.refusals import Refusals
from pagoda_gateway.engine.report import EngineReport, Reports, joined
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_gateway.engine.request_pool import RequestPool
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.engine.waits import Absence, Waits
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, RequestRecord
from pagoda_proto.times import LivedClock


class SessionClient:
    """Implements `EngineClient`. Call `start` once inside the loop, and `aclose` at the end.

    Attributes (read by others, written here only):
        load: The engine cores' last loads, merged; without a connection it has no workers, and the limits stay.
        problem: Why no engine core takes requests from here, as the end of a sentence about it; "" if one does.
    """

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
        self._links = [
            EngineLink(address, self._pool, self.clock, self._waits.silent_s, self._on_change) for address in addresses
        ]
        self._reports = Reports(self._ask_report)
        self.problem = NOT_CONNECTED
        self.load = merged([])
        self._usable = asyncio.Event()  # an engine core is connected and takes new requests
        self._ticking: asyncio.Task[None] | None = None
        metrics.watch_engine(lambda: self.load, lambda: self.connected, lambda: self.num_open)

    @property
    def connected(self) -> bool:
        return any(link.connected for link in self._links)

    @property
    def num_open(self) -> int:
        return self._pool.num_open

    @property
    def recent(self) -> RecentRequests:
        return self._meter.recent

    @property
    def refusals(self) -> Refusals:
        return self._meter.refusals

    async def report(self) -> EngineReport | None:
        """The engine cores' reports on their workers, at most `REPORT_AGE_S` old; None if none answers."""
        return await self._reports.latest()

    async def _ask_report(self) -> EngineReport | None:
        return joined(await asyncio.gather(*(link.report() for link in self._links)))

    @property
    def last_progress_at(self) -> float:
        """By `clock`: when a token last arrived, or a step of any engine core last advanced."""
        return max(link.core.got_on_at for link in self._links)

    def dead_tasks(self) -> list[str]:
        """Long-lived tasks that should be running and are not."""
        found = {
            "engine session": all(link.running for link in self._links),
            "engine clock": self._ticking is not None and not self._ticking.done(),
        }
        return [name for name, runs in found.items() if not runs]

    def start(self) -> None:
        for link in self._links:
            link.start()
        self._ticking = asyncio.create_task(self._keep_ticking(), name="engine-clock")

    async def aclose(self) -> None:
        """End open requests and close the links."""
        self.end_all("the gateway is shutting down")
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await asyncio.gather(*(link.aclose() for link in self._links))

    def end_all(self, why: str) -> None:
        self._pool.fail_all(why)

    # Requests

    async def submit(
        self, record: RequestRecord, *, counted: bool = True, prior: Sequence[Delta] = ()
    ) -> PooledGeneration:
        """Send a record and wait until an engine core accepts it. `prior` is its output so far, from another gateway.

        Raises:
            PagodaError: UNAVAILABLE without an engine core, or the error with which the engine core refused it.
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

    # The links

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(self._waits.tick_s)
            for link in self._links:
                link.tick()
            self._pool.tend()

    def _on_change(self) -> None:
        """Update what the links report together. An engine core reached at several addresses is used at one of them."""
        known: set[str] = set()
        for link in self._links:
            if link.connected and link.core.load.engine_id in known:
                link.pass_over()
            elif link.connected:
                known.add(link.core.load.engine_id)
        problems = [link.problem for link in self._links]
        told = [problem for problem in problems if problem != NOT_CONNECTED]
        self.problem = "" if "" in problems else (told or problems)[0]
        self.load = merged([link.core.load for link in self._links])
        if any(link.core.usable for link in self._links):
            self._absence.end()
            self._usable.set()
        else:
            self._absence.begin(self.clock.now())
            self._usable.clear()
