"""There is at most one session, and none is ever the last: how it ended makes no difference to what happens next.

`SessionClient` keeps one `Engine.Session` stream to one engine core and multiplexes all requests on it. It knows
whether an engine core may be used, and for how long a new request waits for one; the requests themselves are the
pool's. One task keeps the session, another one ticks: it sees silence and tends the pool's deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

import msgspec

from pagoda_gateway.engine.model_view import EngineProgress, ModelView, protocol_problem
from pagoda_gateway.engine.pooled_generation import PooledGeneration
from pagoda_gateway.engine.recent import RecentRequests
from pagoda_gateway.engine.report import EngineReport, Reports
from pagoda_gateway.engine.request_meter import RequestMeter
from pagoda_gateway.engine.request_pool import RequestPool
from pagoda_gateway.engine.session import EngineAddress, Session, SessionEnded
from pagoda_gateway.engine.waits import Absence, Waits
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.convert import load_from_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Load, RequestRecord
from pagoda_proto.times import LivedClock

BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 1.0
NOT_CONNECTED = "is not connected"
_NO_ENGINE = Load(engine_id="")

logger = logging.getLogger(__name__)


class SessionClient:
    """Implements `EngineClient`. Call `start` once inside the loop, and `aclose` at the end.

    Attributes (read by others, written here only):
        load: The engine core's last word; without a connection no workers, the limits stay.
        problem: Why the engine core takes no requests from here, as the end of a sentence about it; "" if it does.
    """

    def __init__(
        self, address: EngineAddress, metrics: GatewayMetrics, waits: Waits | None = None, *, log_requests: bool = True
    ) -> None:
        self._address = address
        self._metrics = metrics
        self._waits = waits or Waits()
        self.clock = LivedClock(self._waits.tick_s, time.monotonic)
        self._absence = Absence(self._waits, self.clock.now())
        self._progress = EngineProgress()
        self._meter = RequestMeter(metrics, log_requests=log_requests)
        self._pool = RequestPool(self.clock, self._waits, metrics, self._meter, self._absence.retry_after_s)
        self._reports = Reports(self._ask_report)
        self._session: Session | None = None
        self.load = _NO_ENGINE
        self.problem = NOT_CONNECTED
        self._usable = asyncio.Event()  # connected, and the engine core takes new requests
        self._tasks: dict[str, asyncio.Task[None]] = {}
        metrics.watch_engine(lambda: self.load, lambda: self.connected, lambda: self.num_open)

    @property
    def connected(self) -> bool:
        return self.problem != NOT_CONNECTED

    @property
    def num_open(self) -> int:
        return self._pool.num_open

    @property
    def recent(self) -> RecentRequests:
        return self._meter.recent

    async def report(self) -> EngineReport | None:
        """What the engine core says of its workers, at most `REPORT_AGE_S` old; None where none answers."""
        return await self._reports.latest()

    async def _ask_report(self) -> EngineReport | None:
        return None if self._session is None else await self._session.report()

    @property
    def last_progress_at(self) -> float:
        """By `clock`: when a token last came here, or a step of the engine core's last advanced."""
        return self._progress.at

    def dead_tasks(self) -> list[str]:
        """Long-lived tasks that should be running and are not."""
        names = ("engine session", "engine clock")
        return [name for name in names if name not in self._tasks or self._tasks[name].done()]

    def start(self) -> None:
        self._tasks["engine session"] = asyncio.create_task(self._keep_session(), name="engine-session")
        self._tasks["engine clock"] = asyncio.create_task(self._keep_ticking(), name="engine-clock")

    async def aclose(self) -> None:
        """End what is open and leave."""
        self.end_all("the gateway is shutting down")
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def end_all(self, why: str) -> None:
        self._pool.fail_all(why)

    # Requests

    async def submit(self, record: RequestRecord, *, counted: bool = True) -> PooledGeneration:
        """Send a record and wait until the engine core took it.

        Raises:
            PagodaError: UNAVAILABLE without an engine core, or what the engine core refused it with.
        """
        await self._wait_usable()
        generation = self._pool.open(record, counted=counted)
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

    # The session

    async def _keep_session(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        refusal = ""
        while True:
            self._session = Session(self._address, self.clock, self._waits.silent_s)
            try:
                await self._session.run(self._on_frame)
            except SessionEnded as ending:
                if self.connected:
                    backoff_s, refusal = BACKOFF_FIRST_S, ""
                    self._lose_session(str(ending))
                elif str(ending) != refusal:
                    refusal = str(ending)
                    logger.warning("no engine core: %s", refusal)
            self._session = None
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(self._waits.tick_s)
            if self._session is not None:
                self._session.tick()
            self._pool.tend()

    def _lose_session(self, how: str) -> None:
        self._metrics.sessions_lost.inc()
        logger.warning("engine core session %s; %d requests wait for another", how, self._pool.num_open)
        self.problem = NOT_CONNECTED
        self.load = msgspec.structs.replace(self.load, num_workers=0, num_running=0, num_waiting=0, kv_usage=0.0)
        self._set_usable(False)
        self._pool.lose()

    def _set_usable(self, usable: bool) -> None:
        if usable:
            self._absence.end()
            self._usable.set()
        else:
            self._absence.begin(self.clock.now())
            self._usable.clear()

    def _on_frame(self, frame: pb.ServerFrame) -> None:
        """A kind of frame that only another version knows is nothing to us."""
        kind = frame.WhichOneof("frame")
        if kind == "outputs":
            if self._pool.on_outputs(frame.outputs):
                self._progress.on_token(self.clock.now())
        elif kind == "load":
            self._on_load(load_from_pb(frame.load))
        elif kind == "accepted":
            self._pool.on_accepted(frame.accepted)
        elif kind == "rejected":
            self._pool.on_rejected(frame.rejected)
        elif kind == "migrate":
            self._pool.on_migrate(frame.migrate)

    def _on_load(self, load: Load) -> None:
        first = not self.connected
        problem = protocol_problem(load)
        if first:
            logger.info("engine core %s connected; %d requests to resume", load.engine_id, self._pool.num_parked)
        if problem:
            if problem != self.problem:
                logger.error("engine core %s is not used: it %s", load.engine_id, problem)
            self.problem = problem
            self._set_usable(False)
            return
        self.problem = "is draining" if load.draining else ""
        self.load = load
        self._progress.on_load(load, self.clock.now())
        self._set_usable(not load.draining)
        if self._session is not None:
            self._pool.meet(ModelView.of(load), self._session.send, usable=not load.draining)
