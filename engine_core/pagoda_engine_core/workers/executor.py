"""The interface to workers of any kind: the engine core sees lives that begin, answer plans in order, and end.

A *life* of a worker is one registration, identified by its `epoch`, which is never reused. Every event of an executor
is about a life, so a result of a worker's earlier life can never be mistaken for one of its current life.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from pagoda_proto.steps import Drain, Hello, ResetWorker, StepPlan, StepResult

log = logging.getLogger(__name__)

MAX_REMEMBERED_LIVES = 32
"""How many ended lives `workers()` still lists."""


class WorkerState(StrEnum):
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"
    HUNG = "hung"
    GONE = "gone"

    @property
    def alive(self) -> bool:
        return self in (WorkerState.READY, WorkerState.SUSPECT, WorkerState.DRAINING)


class LeaveCause(StrEnum):
    """Why a life ended. Each cause means one thing, and so decides whether running requests may have caused it."""

    DIED = "died"  # its process ended
    SILENT = "silent"  # nothing was heard from it for too long
    HUNG = "hung"  # it was heard from, but its step did not end
    STEP_FAILED = "step failed"  # its step raised
    UNREACHABLE = "unreachable"  # messages to it cannot be sent
    MISANSWERED = "misanswered"  # it answered another step than the one due
    RESET = "reset"  # we have lost track of its state
    UNPLANNED = "unplanned"  # its scheduler raised
    RENEWED = "renewed"  # its process registered again
    LEFT = "left"  # it was asked to leave, or said goodbye

    @property
    def blames(self) -> bool:
        """Whether running requests come under suspicion."""
        return self in _BLAMING

    @property
    def end_state(self) -> WorkerState:
        if self is LeaveCause.HUNG:
            return WorkerState.HUNG
        return WorkerState.GONE if self in _HEALTHY else WorkerState.DEAD


_BLAMING = {LeaveCause.DIED, LeaveCause.SILENT, LeaveCause.HUNG, LeaveCause.STEP_FAILED, LeaveCause.UNPLANNED}
_HEALTHY = {LeaveCause.RESET, LeaveCause.UNPLANNED, LeaveCause.RENEWED, LeaveCause.LEFT}


class WorkerJoined(NamedTuple):
    epoch: int
    hello: Hello


class WorkerChanged(NamedTuple):
    """The worker lives on, but its readiness for new work has changed."""

    epoch: int
    state: WorkerState


class WorkerLeft(NamedTuple):
    """The life is over: no event with this epoch follows, and messages sent to it are dropped. After STEP_FAILED,
    `step` is the one that failed."""

    epoch: int
    cause: LeaveCause
    reason: str
    step: int = 0


class StepDone(NamedTuple):
    """The result of a step. A life's results come in the order of its plans, one for each, without gaps."""

    epoch: int
    result: StepResult


ExecutorEvent = WorkerJoined | WorkerChanged | WorkerLeft | StepDone
ToExecutor = StepPlan | Drain | ResetWorker


class WorkerInfo(NamedTuple):
    """A life, current or ended, for display."""

    epoch: int
    hello: Hello
    state: WorkerState
    steps_done: int
    rss_bytes: int = 0  # resident memory as last reported; 0: unknown, or this process


class Executor(Protocol):
    """Computes steps. Only the engine loop thread calls it, except for `wake`."""

    concurrent: bool
    """Whether steps are computed outside `wait`, too. If so, plans may be sent as late as their worker allows."""

    def send(self, epoch: int, message: ToExecutor, deadline_s: float = math.inf) -> None:
        """Send a message. Never blocks. If the worker cannot be reached, or (in an executor that can detect it) takes
        longer than `deadline_s` for a plan, `wait` reports the end of its life.

        `ResetWorker` ends the life (`WorkerLeft`); the worker comes back in a new one.
        """

    def hold(self, numerics_id: str) -> str:
        """While no worker is alive, admit only workers with these numerics, or any with "". After the last life has
        ended, until this is called, only its numerics are admitted. Returns the numerics of a worker refused for that,
        "" if none was."""

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        """Events since the last call. Returns once there are any, on `wake`, or after `timeout_s`."""

    def wake(self) -> None:
        """Make the current (or next) `wait` return at once. May be called from any thread."""

    def workers(self) -> Sequence[WorkerInfo]:
        """All current lives, and the latest ended ones."""

    def counters(self) -> Mapping[str, int]:
        """Monotonic counters, by name."""

    def close(self) -> None:
        """Release all resources. The lives end without an event."""


Launched = TypeVar("Launched")


class Runner(Protocol[Launched]):
    """The core of a worker: executes plans in order and keeps the state of rows between them."""

    @property
    def depth(self) -> int:
        """How many plans to have launched at once: more than 1 if a launch does not wait for the device."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start executing a plan."""

    def collect(self, launched: Launched, /) -> StepResult:
        """Wait for the result of a launched plan. Called in the order of the plans."""

    def reset(self) -> None:
        """Forget all rows and all launched plans not collected."""


class InprocExecutor(Generic[Launched]):
    """One worker inside this process, driven by the thread that calls `wait`. Each call returns one result; before
    waiting for it, it launches as many plans as the runner takes, so that a device always has its next step.

    A runner that raises has failed a step like any worker: its life ends, its rows are forgotten, a new life begins.
    """

    concurrent = False

    def __init__(self, runner: Runner[Launched], hello: Hello) -> None:
        self._runner = runner
        self._hello = hello
        self._plans: deque[StepPlan] = deque()
        self._launched: deque[tuple[int, Launched]] = deque()  # with their steps
        self._events: deque[ExecutorEvent] = deque()
        self._woken = threading.Event()
        self._epoch = 0
        self._steps_done = 0
        self._deaths = 0
        self._begin_life()

    def send(self, epoch: int, message: ToExecutor, deadline_s: float = math.inf) -> None:
        if epoch != self._epoch:
            return
        match message:
            case StepPlan():
                self._plans.append(message)
            case ResetWorker():
                self._end_life(LeaveCause.RESET, "reset by the engine core")
                self._begin_life()
            case Drain():
                self._end_life(LeaveCause.LEFT, "drained")
                self._epoch = -1

    def hold(self, numerics_id: str) -> str:
        """No worker is ever refused: the only one keeps its numerics."""
        return ""

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        if not self._events and (self._plans or self._launched):
            self._advance()
        elif not self._events and timeout_s > 0:
            self._woken.wait(timeout_s)
        self._woken.clear()
        events = list(self._events)
        self._events.clear()
        return events

    def wake(self) -> None:
        self._woken.set()

    def workers(self) -> Sequence[WorkerInfo]:
        if self._epoch < 0:
            return []
        return [WorkerInfo(self._epoch, self._hello, WorkerState.READY, self._steps_done)]

    def counters(self) -> Mapping[str, int]:
        return {"worker_deaths": self._deaths}

    def close(self) -> None:
        self._plans.clear()
        self._launched.clear()
        self._events.clear()

    def _advance(self) -> None:
        """Bring the oldest step to its result."""
        step = 0
        try:
            while self._plans and len(self._launched) < self._runner.depth:
                plan = self._plans.popleft()
                step = plan.step
                self._launched.append((step, self._runner.launch(plan)))
            step, launched = self._launched.popleft()
            result = self._runner.collect(launched)
        except Exception as error:  # the boundary of a worker: no error in it may end the engine core
            log.exception("the in-process runner failed in step %d", step)
            self._deaths += 1
            self._end_life(LeaveCause.STEP_FAILED, f"{type(error).__name__}: {error}", step)
            self._begin_life()
        except BaseException:  # our caller is interrupted, and the state of the step is unknown
            self._end_life(LeaveCause.LEFT, "interrupted")
            self._begin_life()
            raise
        else:
            self._steps_done += 1
            self._events.append(StepDone(self._epoch, result))

    def _end_life(self, cause: LeaveCause, reason: str, step: int = 0) -> None:
        self._plans.clear()
        self._launched.clear()
        self._runner.reset()
        self._events.append(WorkerLeft(self._epoch, cause, reason, step))

    def _begin_life(self) -> None:
        self._epoch += 1
        self._events.append(WorkerJoined(self._epoch, self._hello))
