"""Keeps at most one session with an engine core, and opens another whenever it ends, for whatever reason.

One task keeps the session; the link's owner ticks. The link hands the pool what arrives for requests, and every change
of whether the engine core is usable.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import msgspec

from pagoda_gateway.engine.cores import Core
from pagoda_gateway.engine.model_view import EngineProgress, ModelView, protocol_problem
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
IS_DOUBLE = "is there already, by another address"

logger = logging.getLogger(__name__)


class EngineLink:
    """`on_change` is called when the engine core is lost, is found, or reports a new load.

    Attributes (read by others, written here only):
        core: What the pool knows of it. Without a connection its load has no workers; the limits stay.
        problem: Why it takes no requests from here, as the end of a sentence about it; "" if it does.
    """

    def __init__(
        self,
        address: EngineAddress,
        pool: RequestPool,
        clock: LivedClock,
        silent_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._pool = pool
        self._clock = clock
        self._silent_s = silent_s
        self._on_change = on_change
        self._progress = EngineProgress()
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_double = False
        self.core = Core(name=address.text)
        self.problem = NOT_CONNECTED
        pool.add(self.core)

    @property
    def connected(self) -> bool:
        return self.problem != NOT_CONNECTED

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def pass_over(self) -> None:
        """Do not use this link: its engine core already has one, at another address."""
        if not self._is_double:
            logger.warning("engine core %s has another address, too: %s", self.core.load.engine_id, self._address.text)
        self._is_double = True
        self.problem = IS_DOUBLE
        self.core.usable = False

    async def report(self) -> EngineReport | None:
        return None if self._session is None else await self._session.report()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_session(), name="engine-session")

    def tick(self) -> None:
        if self._session is not None:
            self._session.tick()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_session(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        refusal = ""
        while True:
            self._session = Session(self._address, self._clock, self._silent_s)
            try:
                await self._session.run(self.on_frame)
            except SessionEnded as ending:
                if self.connected:
                    backoff_s, refusal = BACKOFF_FIRST_S, ""
                    self._lose(str(ending))
                elif str(ending) != refusal:
                    refusal = str(ending)
                    logger.warning("no engine core at %s: %s", self._address.text, refusal)
            self._session = None
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)

    def _lose(self, how: str) -> None:
        load = self.core.load
        logger.warning("session to engine core %s %s; %d requests are open", load.engine_id, how, self._pool.num_open)
        self.problem = NOT_CONNECTED
        self.core.load = msgspec.structs.replace(load, num_workers=0, num_running=0, num_waiting=0, kv_usage=0.0)
        self.core.send, self.core.usable = None, False
        self._on_change()
        self._pool.lose(self.core)

    def on_frame(self, frame: pb.ServerFrame) -> None:
        """Ignores kinds of frames that only another version knows."""
        kind = frame.WhichOneof("frame")
        self.core.heard_at = self._clock.now()
        if kind == "outputs":
            if self._pool.on_outputs(self.core, frame.outputs):
                self._progress.on_token(self.core.heard_at)
                self.core.got_on_at = self._progress.at
        elif kind == "load":
            self._on_load(load_from_pb(frame.load))
        elif kind == "accepted":
            self._pool.on_accepted(self.core, frame.accepted)
        elif kind == "rejected":
            self._pool.on_rejected(self.core, frame.rejected)
        elif kind == "migrate":
            self._pool.on_migrate(self.core, frame.migrate)

    def _on_load(self, load: Load) -> None:
        problem = protocol_problem(load)
        if not self.connected:
            logger.info("engine core %s connected; %d requests to resume", load.engine_id, self._pool.num_parked)
        if problem:
            if problem != self.problem:
                logger.error("engine core %s is not used: it %s", load.engine_id, problem)
            self.problem = problem
            self.core.usable = False
            self._on_change()
            return
        self.problem = "is draining" if load.draining else ""
        core = self.core
        core.load, core.usable, core.sent = load, not load.draining, 0
        self._progress.on_load(load, self._clock.now())
        core.got_on_at = self._progress.at
        core.send = None if self._session is None else self._session.send
        self._on_change()
        if core.send is not None:
            self._pool.meet(core, ModelView.of(load))
