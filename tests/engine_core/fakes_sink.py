"""A sink that records what it receives, and a scripted executor."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
from tests.engine_core.fake_worker import runner_of
from tests.fakes import FakeRunner

from pagoda_engine_core.workers.executor import (
    ExecutorEvent,
    StepDone,
    ToExecutor,
    WorkerInfo,
    WorkerJoined,
    WorkerState,
)
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import Delta, FinishReason, NextTokens
from pagoda_proto.steps import Hello, StepPlan, StepResult


class ResettableRunner(FakeRunner):
    """A FakeRunner that can be reset, and whose steps finish when they are launched."""

    depth = 1

    def launch(self, plan: StepPlan) -> StepResult:
        return self.execute(plan)

    def collect(self, launched: StepResult) -> StepResult:
        return launched

    def reset(self) -> None:
        self.rows.clear()
        self.failed_rows.clear()
        self.steps_done = 0
        self.__post_init__()


class RecordingSink:
    """Also asserts that positions are consecutive and that each request ends once."""

    def __init__(self) -> None:
        self.accepted_ids: list[tuple[str, int]] = []
        self.rejections: dict[str, PagodaError] = {}
        self.retry_after_s: dict[str, float] = {}
        self.migrated: list[tuple[str, int]] = []
        self.batches: list[list[Delta]] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.endings: dict[str, Delta] = {}
        self._changed = threading.Condition()

    def accepted(self, request_id: str, attempt: int, stream: int) -> None:
        with self._changed:
            self.accepted_ids.append((request_id, attempt))
            self._changed.notify_all()

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        with self._changed:
            self.rejections[request_id] = error
            self.retry_after_s[request_id] = retry_after_s
            self._changed.notify_all()

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        with self._changed:
            self.migrated.append((request_id, attempt))
            self._changed.notify_all()

    def next_tokens(self, tokens: NextTokens) -> None:
        self.deltas(tokens.deltas())

    def deltas(self, deltas: list[Delta]) -> None:
        with self._changed:
            self.batches.append(deltas)
            for delta in deltas:
                self._take(delta)
            self._changed.notify_all()

    def _take(self, delta: Delta) -> None:
        key = (delta.request_id, delta.choice)
        tokens = self.tokens.setdefault(key, [])
        assert delta.result.first_index == len(tokens), f"{key}: {delta.result.first_index} after {len(tokens)} tokens"
        assert key not in self.reasons, f"{key} goes on after its ending"
        tokens += delta.result.token_ids
        if delta.finish_reason is not None:
            self.reasons[key] = delta.finish_reason
        if delta.ends_request:
            assert delta.request_id not in self.endings
            self.endings[delta.request_id] = delta

    def prime(self, request_id: str, choice: int, tokens: list[int]) -> None:
        """Record tokens that an earlier attempt delivered."""
        self.tokens[request_id, choice] = list(tokens)

    def choices(self, request_id: str) -> list[list[int]]:
        return [tokens for (name, _), tokens in sorted(self.tokens.items()) if name == request_id]

    def wait(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise TimeoutError(f"endings: {len(self.endings)}, rejections: {self.rejections}")

    def wait_endings(self, count: int) -> None:
        self.wait(lambda: len(self.endings) + len(self.rejections) >= count)


class ScriptedExecutor:
    """Tests add events and look at what was sent; `answer` lets a FakeRunner compute the oldest plan of an epoch."""

    concurrent = True

    def __init__(self) -> None:
        self.events: deque[ExecutorEvent] = deque()
        self.sent: list[tuple[int, ToExecutor]] = []
        self.plans: dict[int, deque[StepPlan]] = {}
        self.runners: dict[int, FakeRunner] = {}
        self.worked_s = 0.0  # step time that workers report; 0: none
        self.deadlines_s: list[float] = []  # of the plans that were sent
        self.waits_s: list[float] = []  # the timeout of each wait
        self.closed = False
        self.lives: list[WorkerInfo] = []  # additional entries for `workers` only
        self.held: list[str] = []  # every change of the held numerics, in order

    def hold(self, numerics_id: str) -> str:
        if self.held[-1:] != [numerics_id]:
            self.held.append(numerics_id)
        return ""

    def join(self, epoch: int, hello: Hello) -> FakeRunner:
        self.events.append(WorkerJoined(epoch, hello))
        self.plans[epoch] = deque()
        self.runners[epoch] = runner_of(hello)
        return self.runners[epoch]

    def answer(self, epoch: int) -> bool:
        if not self.plans[epoch]:
            return False
        result = self.runners[epoch].execute(self.plans[epoch].popleft())
        if self.worked_s:
            result = msgspec.structs.replace(result, elapsed_s=self.worked_s)
        self.events.append(StepDone(epoch, result))
        return True

    def answer_all(self) -> bool:
        return sum(self.answer(epoch) for epoch in self.plans) > 0

    def send(self, epoch: int, message: ToExecutor, deadline_s: float = math.inf) -> None:
        self.sent.append((epoch, message))
        if isinstance(message, StepPlan) and epoch in self.plans:  # dropped if that life is over
            self.plans[epoch].append(message)
            self.deadlines_s.append(deadline_s)

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        self.waits_s.append(timeout_s)
        events = list(self.events)
        self.events.clear()
        return events

    def wake(self) -> None:
        pass

    def workers(self) -> Sequence[WorkerInfo]:
        joining = [event for event in self.events if hasattr(event, "hello")]
        return [*(WorkerInfo(0, event.hello, WorkerState.READY, 0) for event in joining), *self.lives]

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True
