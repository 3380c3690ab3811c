"""Healthy means that the model made progress lately, not that a port answers.

Ready = not draining, callers known, a session to an engine core with a worker, and progress within `success_max_age_s`:
a token that arrived here, or a step of the engine core, which may belong to a prefill that takes minutes. While there
is work, progress is visible for free; after `idle_s` without any, the gateway sends a *canary*: an ordinary request for
one token, of low priority, which only our own metrics know to be a canary. A canary that fails while other requests'
steps progress proves nothing either way.

So the gateway is unready `success_max_age_s` after the last step of a frozen engine core or worker, in time that the
gateway lived through, and a busy one is ready as long as its steps are closer together than that.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto import times
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import LAST_PRIORITY, SamplingParams
from pagoda_proto.pooling.kinds import GENERATE
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import FinishReason, Generate, Pool, RequestRecord, Task

logger = logging.getLogger(__name__)

ONE_TOKEN = Generate(params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), seed=0)


def canary_of(output: str) -> Task:
    """The task of a canary for a model with this kind of output."""
    return ONE_TOKEN if output == GENERATE else Pool(pooling=PoolingParams(output=output))


@dataclass(frozen=True, kw_only=True)
class HealthTimes:
    success_max_age_s: float = times.STEP_DEADLINE_S
    idle_s: float = 10.0
    canary_timeout_s: float = 3.0
    canary_spacing_s: float = 1.0
    tick_s: float = 0.25
    first_tick_s: float = 0.02  # the first pause: somebody is waiting for readiness


def pauses_before_ready(times: HealthTimes) -> Iterator[float]:
    """Yield seconds between checks, each about a hundredth of the time so far: a start that takes a second is reported
    at once, and one that takes hours costs no more than being ready."""
    pause_s = min(times.first_tick_s, times.tick_s)
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.01, times.tick_s)


class Health:
    """One task watches and reports changes; all other methods answer about the present moment."""

    def __init__(
        self,
        engine: SessionClient,
        metrics: GatewayMetrics,
        health_times: HealthTimes | None = None,
        task: Task = ONE_TOKEN,
        knows_callers: Callable[[], bool] = lambda: True,
    ) -> None:
        """`task` is what a canary asks of the model. `knows_callers`: whether API keys can be looked up."""
        self.draining = False
        self.started = False  # whether it was ever ready
        self._engine = engine
        self._metrics = metrics
        self._times = health_times or HealthTimes()
        self._task_of_canary = task
        self._knows_callers = knows_callers
        self._was_ready = False
        self._on_change: Callable[[bool], None] = lambda ready: None
        self._next_canary_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def problems(self) -> list[str]:
        """Why the gateway is not ready; empty when it is."""
        engine, max_age_s = self._engine, self._times.success_max_age_s
        age_s = engine.clock.now() - engine.last_progress_at
        found = {
            "draining": self.draining,
            "the store has not answered yet, so API keys cannot be looked up": not self._knows_callers(),
            f"engine core {engine.problem}": bool(engine.problem),
            "no worker": engine.connected and not engine.load.num_workers,
            f"no token and no step within {max_age_s:g} s": age_s >= max_age_s,
        }
        return [problem for problem, is_so in found.items() if is_so]

    def dead_tasks(self) -> list[str]:
        """Long-lived tasks that should be running and are not."""
        dead = self._engine.dead_tasks()
        return dead if self._task is not None and not self._task.done() else [*dead, "health"]

    @property
    def phase(self) -> str:
        """How far the start has come: connecting, waiting_for_worker, warming_up, ready."""
        if self.started:
            return "ready"
        if not self._engine.connected:
            return "connecting"
        return "waiting_for_worker" if self._engine.load.num_workers < 1 else "warming_up"

    def start(self, on_change: Callable[[bool], None]) -> None:
        """Start watching, and report each change of readiness to `on_change`."""
        self._on_change = on_change
        self._task = asyncio.create_task(self._run(), name="health")

    def drain(self) -> None:
        """Be unready from now on, in any case."""
        self.draining = True
        self._tell()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        for pause_s in pauses_before_ready(self._times):
            if self._canary_due():
                await self._try_canary()
            self._tell()
            await asyncio.sleep(self._times.tick_s if self.started else pause_s)

    def _tell(self) -> None:
        is_ready = not self.problems()
        self.started |= is_ready
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            self._on_change(is_ready)

    def _canary_due(self) -> bool:
        engine = self._engine
        if self.draining or engine.problem or engine.load.num_workers < 1:
            return False
        now = engine.clock.now()
        return now >= self._next_canary_at and now - engine.last_progress_at >= self._times.idle_s

    async def _try_canary(self) -> None:
        self._next_canary_at = self._engine.clock.now() + self._times.canary_spacing_s
        progress_before = self._engine.last_progress_at
        outcome = "failure"
        try:
            async with asyncio.timeout(self._times.canary_timeout_s):
                outcome = "success" if await self._canary() else "failure"
        except (TimeoutError, PagodaError) as error:
            # It may wait behind others' prefills, whose steps have then proved what it was to prove.
            if self._engine.last_progress_at > progress_before:
                outcome = "overtaken"
            else:
                logger.warning("canary failed: %s", self._reason(error))
        self._metrics.canary[outcome].inc()

    def _reason(self, error: TimeoutError | PagodaError) -> str:
        if isinstance(error, PagodaError):
            return f"{error.code}: {error.message}"
        return f"no token within {self._times.canary_timeout_s:g} s"

    async def _canary(self) -> bool:
        record = RequestRecord(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=[0],
            task=self._task_of_canary,
            cache_salt="canary",
            priority=LAST_PRIORITY,
            queue_timeout_s=self._times.canary_timeout_s,
        )
        generation = await self._engine.submit(record, counted=False)
        reason = None
        try:
            while deltas := await generation.next():
                reason = deltas[-1].finish_reason
        finally:
            await generation.aclose()
        return reason in (FinishReason.STOP, FinishReason.LENGTH)
