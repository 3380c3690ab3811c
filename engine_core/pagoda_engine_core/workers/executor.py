"""Whoever computes, the engine core sees the same thing: lives that begin, answer plans in order, and end.

A *life* of a worker is one registration and is named by its `epoch`, which is never used twice. Everything an executor
says is about a life, so a result of an earlier life of the same worker can never be mistaken for one of the present.
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
"""How many ended lives `workers()` goes on listing."""


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
    """Why a life ended. Each means one thing, so that each says whether what was running may have done it."""

    DIED = "died"  # its process ended
    SILENT = "silent"  # nothing was heard of it for too long
    HUNG = "hung"  # it was heard, but its step did not end
    STEP_FAILED = "step failed"  # its step raised
    UNREACHABLE = "unreachable"  # it does not take what it is sent
    MISANSWERED = "misanswered"  # it answered what it was not asked
    RESET = "reset"  # we have lost track of what it holds
    UNPLANNED = "unplanned"  # its scheduler raised
    RENEWED = "renewed"  # its process registered again
    LEFT = "left"  # it was asked to leave, or said goodbye

    @property
    def blames(self) -> bool:
        """Whether requests that were running come under suspicion."""
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
    """The worker lives on, but may now (or may no longer) be given new work."""

    epoch: int
    state: WorkerState


class WorkerLeft(NamedTuple):
    """The life is over: no event with this epoch follows, and whatever is sent to it goes nowhere. After STEP_FAILED
    `step` is the one that failed."""

    epoch: int
    cause: LeaveCause
    reason: str
    step: int = 0


class StepDone(NamedTuple):
    """Results of a life come in the order of its plans, one each, without gaps."""

    epoch: int
    result: StepResult


ExecutorEvent = WorkerJoined | WorkerChanged | WorkerLeft | StepDone
ToExecutor = StepPlan | Drain | ResetWorker


class WorkerInfo(NamedTuple):
    """A life, present or past, for people to look at."""

    epoch: int
    hello: Hello
    state: WorkerState
    steps_done: int
    rss_bytes: int = 0  # resident memory as it said last; 0: unknown, or ours


class Executor(Protocol):
    """Where steps are computed. Called by the engine loop's thread only, except `wake`."""

    concurrent: bool
    """Whether they are computed also while nobody is in `wait`: then a plan may come as late as its worker lets it."""

    def send(self, epoch: int, message: ToExecutor, deadline_s: float = math.inf) -> None:
        """Pass a message on. Never blocks; a worker that cannot be reached ends its life by an event of `wait`, and so
        does one that computes longer than `deadline_s` at a plan, where somebody else can see that.

        After `ResetWorker` the life is over (`WorkerLeft`); the worker comes back in a new one.
        """

    def hold(self, numerics_id: str) -> str:
        """While no life goes on, only workers of these numerics may begin one; "" lets any. Until this is called after
        a last life has ended, those are the numerics of that one. Returns those of a worker that was turned away
        for that, "" for none."""

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        """What has happened; returns as soon as there is something, on `wake`, or after `timeout_s`."""

    def wake(self) -> None:
        """Make a `wait` that is in progress (or the next one) return at once. May be called from any thread."""

    def workers(self) -> Sequence[WorkerInfo]:
        """Every life that goes on, and the ones that ended lately."""

    def counters(self) -> Mapping[str, int]:
        """Monotone numbers worth watching, by name."""

    def close(self) -> None:
        """Let go of every resource. The lives end without an event."""


Launched = TypeVar("Launched")


class Runner(Protocol[Launched]):
    """What a worker wraps: executes plans in order and keeps the state of rows between them."""

    @property
    def depth(self) -> int:
        """How many plans it is good to have launched at once: more than 1 where a launch does not wait for a device."""

    def launch(self, plan: StepPlan) -> Launched:
        """Set a plan going."""

    def collect(self, launched: Launched, /) -> StepResult:
        """The result of a launched plan, waiting for it if need be; called in the order of the plans."""

    def reset(self) -> None:
        """Forget all rows, and what was launched and not collected."""


class InprocExecutor(Generic[Launched]):
    """One worker inside this process, driven by the thread that calls `wait`: one result per call, and before it is
    waited for, as many plans are launched as the runner takes, so that a device always has its next step.

    A runner that raises has failed a step as a worker would: its life ends, its rows are forgotten, a new life begins.
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
        """Nobody is ever turned away: the one worker there is keeps its numerics."""
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
        except Exception as error:  # the border of a worker: whatever it was, the engine core lives on
            log.exception("the in-process runner failed in step %d", step)
            self._deaths += 1
            self._end_life(LeaveCause.STEP_FAILED, f"{type(error).__name__}: {error}", step)
            self._begin_life()
        except BaseException:  # whoever drives us is interrupted, and nobody knows how far the step has come
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
