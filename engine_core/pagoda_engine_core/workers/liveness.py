"""Two timeouts: a worker is alive while it is heard from, and makes progress while its oldest plan is young.

Only the caller's monotonic clock counts, never a peer's. If the engine core itself was held up, every age includes that
time, so it is subtracted from all of them before any worker is judged.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.workers.executor import LeaveCause, WorkerState
from pagoda_proto.times import StallGuard

TICK_S = 0.25
"""How often `tick` is due."""


class Change(NamedTuple):
    """A new state of a life or, with a `cause`, its end."""

    epoch: int
    state: WorkerState
    reason: str
    cause: LeaveCause | None = None


@dataclass(slots=True)
class _Life:
    heard_at: float
    draining: bool = False
    dismissed: bool = False  # it was asked to leave now
    suspect: bool = False
    owes_since: float | None = None  # when its oldest unanswered plan (or drain) became the oldest
    answered_at: float = -math.inf  # when it last answered a plan
    deadlines_s: deque[float] = field(default_factory=deque)  # of its unanswered plans
    busy_s: float = 0.0  # age of its running step, as last reported

    @property
    def state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        return WorkerState.SUSPECT if self.suspect else WorkerState.READY

    def stuck_s(self, now: float) -> float:
        """How long its step has been running. A beat may describe a step whose result overtook the beat."""
        owes_s = 0.0 if self.owes_since is None else now - self.owes_since
        return max(owes_s, min(self.busy_s, now - self.answered_at))


class Liveness:
    """The state of every life, by epoch. A life whose end `tick` reported is forgotten."""

    def __init__(self, config: EngineConfig, now: float) -> None:
        self._config = config
        self._lives: dict[int, _Life] = {}
        self._guard = StallGuard(TICK_S, now)

    def join(self, epoch: int, now: float) -> None:
        self._lives[epoch] = _Life(heard_at=now)

    def forget(self, epoch: int) -> None:
        self._lives.pop(epoch, None)

    def state(self, epoch: int) -> WorkerState:
        return self._lives[epoch].state

    def beat(self, epoch: int, busy_s: float, now: float) -> None:
        life = self._lives[epoch]
        life.heard_at = now
        life.busy_s = busy_s

    def owes(self, epoch: int, deadline_s: float, now: float) -> None:
        """Note a plan that was sent, with its deadline. Only the oldest plan ages, from when it became the oldest."""
        life = self._lives[epoch]
        life.deadlines_s.append(deadline_s)
        if life.owes_since is None:
            life.owes_since = now

    def answered(self, epoch: int, now: float) -> None:
        """Note that the oldest plan was answered."""
        life = self._lives[epoch]
        life.heard_at = life.answered_at = now
        life.busy_s = 0.0
        life.deadlines_s.popleft()
        life.owes_since = now if life.deadlines_s or life.dismissed else None

    def leaves(self, epoch: int) -> bool:
        """Note that the worker says it is to leave; whether that is new."""
        life = self._lives[epoch]
        is_news, life.draining = not life.draining, True
        return is_news

    def drain(self, epoch: int, now: float) -> None:
        """Note that the worker was asked to leave now, which it owes us like a plan."""
        life = self._lives[epoch]
        life.draining = life.dismissed = True
        if life.owes_since is None:
            life.owes_since = now

    def tick(self, now: float) -> list[Change]:
        """Judge every life. Call it after handling everything that has arrived, at least every `TICK_S`."""
        held_up_s = self._guard.tick(now)
        if held_up_s:
            self._forgive(held_up_s)
        changes = []
        for epoch, life in list(self._lives.items()):
            change = self._judge(epoch, life, now)
            if change is not None:
                changes.append(change)
                if change.cause is not None:
                    del self._lives[epoch]
        return changes

    def _forgive(self, gap_s: float) -> None:
        for life in self._lives.values():
            life.heard_at += gap_s
            if life.owes_since is not None:
                life.owes_since += gap_s

    def _judge(self, epoch: int, life: _Life, now: float) -> Change | None:
        silent_s = now - life.heard_at
        stuck_s = life.stuck_s(now)
        deadline_s = life.deadlines_s[0] if life.deadlines_s else self._config.step_deadline_s
        if silent_s > self._config.worker_dead_s:
            return Change(epoch, WorkerState.DEAD, f"nothing heard for {silent_s:.1f} s", LeaveCause.SILENT)
        if stuck_s > deadline_s:
            reason = f"alive, but its step has not ended for {stuck_s:.1f} s of {deadline_s:.1f} s"
            return Change(epoch, WorkerState.HUNG, reason, LeaveCause.HUNG)
        suspect = silent_s > self._config.worker_suspect_s
        if suspect == life.suspect:
            return None
        life.suspect = suspect
        return Change(epoch, life.state, f"nothing heard for {silent_s:.1f} s" if suspect else "heard again")
