"""There is at most one session with an engine core, and none is ever the last: how it ended makes no difference to what
happens next. What is known of the engine core meanwhile is here; the requests are the pool's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import NoReturn

import msgspec

from pagoda_gateway.engine.model_view import EngineProgress, protocol_problem
from pagoda_gateway.engine.report import EngineReport
from pagoda_gateway.engine.request_pool import RequestPool
from pagoda_gateway.engine.session import EngineAddress, Session, SessionEnded
from pagoda_proto.convert import load_from_pb
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.records import Load
from pagoda_proto.times import LivedClock

BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 1.0
NOT_CONNECTED = "is not connected"
_NO_ENGINE = Load(engine_id="")

logger = logging.getLogger(__name__)


class Link:
    """Of this gateway to one engine core. `run` it in a task, `tick` it all the while.

    Attributes (read by others, written here only):
        load: The engine core's last word; without a connection no workers, the limits stay.
        problem: Why the engine core takes no requests from here, as the end of a sentence about it; "" if it does.
    """

    def __init__(
        self,
        address: EngineAddress,
        clock: LivedClock,
        silent_s: float,
        pool: RequestPool,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called before the pool is, whenever `problem` may be another one."""
        self._address = address
        self._clock = clock
        self._silent_s = silent_s
        self._pool = pool
        self._place = pool.new_place()
        self._on_change = on_change
        self._session: Session | None = None
        self._refusal = ""
        self.num_lost = 0  # sessions
        self.progress = EngineProgress()
        self.load = _NO_ENGINE
        self.problem = NOT_CONNECTED

    @property
    def connected(self) -> bool:
        return self.problem != NOT_CONNECTED

    @property
    def usable(self) -> bool:
        return not self.problem

    async def report(self) -> EngineReport | None:
        return None if self._session is None else await self._session.report()

    def tick(self) -> None:
        if self._session is not None:
            self._session.tick()

    async def run(self) -> NoReturn:
        backoff_s = BACKOFF_FIRST_S
        while True:
            self._session = Session(self._address, self._clock, self._silent_s)
            try:
                await self._session.run(self._on_frame)
            except SessionEnded as ending:
                if self.connected:
                    backoff_s = BACKOFF_FIRST_S
                self._ended(str(ending))
            self._session = None
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)

    def _ended(self, how: str) -> None:
        if not self.connected:
            if how != self._refusal:
                logger.warning("no engine core: %s", how)
            self._refusal = how
            return
        logger.warning("engine core session %s; %d requests wait for another", how, self._place.num_open)
        self._refusal = ""
        self.num_lost += 1
        self.problem = NOT_CONNECTED
        self.load = msgspec.structs.replace(self.load, num_workers=0, num_running=0, num_waiting=0, kv_usage=0.0)
        self._on_change()
        self._pool.lose(self._place)

    def _on_frame(self, frame: pb.ServerFrame) -> None:
        """A kind of frame that only another version knows is nothing to us."""
        kind = frame.WhichOneof("frame")
        if kind == "outputs":
            if self._pool.on_outputs(self._place, frame.outputs):
                self.progress.on_token(self._clock.now())
        elif kind == "load":
            self._on_load(load_from_pb(frame.load))
        elif kind == "accepted":
            self._pool.on_accepted(self._place, frame.accepted)
        elif kind == "rejected":
            self._pool.on_rejected(frame.rejected)
        elif kind == "migrate":
            self._pool.on_migrate(frame.migrate)

    def _on_load(self, load: Load) -> None:
        if not self.connected:
            logger.info("engine core %s connected; %d requests to resume", load.engine_id, self._pool.num_parked)
        problem = protocol_problem(load)
        if problem:
            if problem != self.problem:
                logger.error("engine core %s is not used: it %s", load.engine_id, problem)
            self.problem = problem
            self._on_change()
            return
        self.problem = "is draining" if load.draining else ""
        self.load = load
        self.progress.on_load(load, self._clock.now())
        self._on_change()
        if self._session is not None:
            self._pool.meet(self._place, load, self._session.send)


def together(loads: list[Load]) -> Load:
    """What several engine cores say, as if they were one. `loads` are not empty; of their models the first that is
    known counts."""
    known = next((load for load in loads if load.model_fingerprint), loads[0])
    if len(loads) == 1:
        return known
    return msgspec.structs.replace(
        known,
        num_workers=sum(load.num_workers for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_running=sum(load.num_running for load in loads),
        kv_usage=round(max(load.kv_usage for load in loads), 3),
        draining=all(load.draining for load in loads),
        max_model_len=min((load.max_model_len for load in loads if load.max_model_len), default=0),
        seconds_since_progress=min(load.seconds_since_progress for load in loads),
    )


def reports_together(reports: list[EngineReport]) -> EngineReport | None:
    if len(reports) < 2:
        return next(iter(reports), None)
    names = dict.fromkeys(name for report in reports for name in report.totals)
    return EngineReport(
        at_s=min(report.at_s for report in reports),
        workers=tuple(worker for report in reports for worker in report.workers),
        totals={name: sum(report.totals.get(name, 0) for report in reports) for name in names},
    )
