"""Healthy means that tokens came lately, not that a port answers.

Ready = not draining, a session to an engine core with a worker, and a token within `success_max_age_s`. While users'
requests bring tokens, that is seen for free; after `idle_s` without one, a *canary* is sent: an ordinary request for
one token, of low priority, known as a canary to nothing but our own metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from pagoda_gateway.engine_client import SessionClient
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import FinishReason, RequestRecord

CANARY_PRIORITY = 1_000_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HealthTimes:
    success_max_age_s: float = 60.0
    idle_s: float = 10.0
    canary_timeout_s: float = 3.0
    canary_spacing_s: float = 1.0
    tick_s: float = 0.25


class Health:
    """One task watches and tells; everything else is a question about this moment."""

    def __init__(self, engine: SessionClient, metrics: GatewayMetrics, times: HealthTimes | None = None) -> None:
        self.draining = False
        self.started = False  # whether it was ever ready
        self._engine = engine
        self._metrics = metrics
        self._times = times or HealthTimes()
        self._was_ready = False
        self._on_change: Callable[[bool], None] = lambda ready: None
        self._next_canary_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def problems(self) -> list[str]:
        """Why the gateway is not ready; empty when it is."""
        load = self._engine.load
        age_s = time.monotonic() - self._engine.last_progress_at
        found = {
            "draining": self.draining,
            "engine core not connected": not self._engine.connected,
            "engine core draining": self._engine.connected and load.draining,
            "no worker": self._engine.connected and load.num_workers < 1,
            f"no token within {self._times.success_max_age_s:g} s": age_s >= self._times.success_max_age_s,
        }
        return [problem for problem, is_so in found.items() if is_so]

    def dead_tasks(self) -> list[str]:
        """Long-lived tasks that should be running and are not."""
        alive = {"engine session": self._engine.alive, "health": self._task is not None and not self._task.done()}
        return [name for name, is_alive in alive.items() if not is_alive]

    @property
    def phase(self) -> str:
        """How far the start has come: connecting, waiting_for_worker, warming_up, ready."""
        if self.started:
            return "ready"
        if not self._engine.connected:
            return "connecting"
        return "waiting_for_worker" if self._engine.load.num_workers < 1 else "warming_up"

    def start(self, on_change: Callable[[bool], None]) -> None:
        """Watch, and tell of each change of readiness."""
        self._on_change = on_change
        self._task = asyncio.create_task(self._run(), name="health")

    def drain(self) -> None:
        """Unready from now on, whatever else is well."""
        self.draining = True
        self._tell()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            if self._canary_due():
                await self._try_canary()
            self._tell()
            await asyncio.sleep(self._times.tick_s)

    def _tell(self) -> None:
        is_ready = not self.problems()
        self.started |= is_ready
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            self._on_change(is_ready)

    def _canary_due(self) -> bool:
        load = self._engine.load
        if self.draining or not self._engine.connected or load.draining or load.num_workers < 1:
            return False
        now = time.monotonic()
        return now >= self._next_canary_at and now - self._engine.last_progress_at >= self._times.idle_s

    async def _try_canary(self) -> None:
        self._next_canary_at = time.monotonic() + self._times.canary_spacing_s
        try:
            async with asyncio.timeout(self._times.canary_timeout_s):
                succeeded = await self._canary()
        except (TimeoutError, PagodaError) as error:
            logger.warning("canary failed: %s", error or "timeout")
            succeeded = False
        self._metrics.canary["success" if succeeded else "failure"].inc()

    async def _canary(self) -> bool:
        record = RequestRecord(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=[0],
            params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            seed=0,
            cache_salt="canary",
            priority=CANARY_PRIORITY,
            queue_timeout_s=self._times.canary_timeout_s,
        )
        generation = await self._engine.submit(record, canary=True)
        reason = None
        try:
            while deltas := await generation.next():
                reason = deltas[-1].finish_reason
        finally:
            await generation.aclose()
        return reason in (FinishReason.STOP, FinishReason.LENGTH)
