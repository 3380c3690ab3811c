"""Workers join, die, pause, become suspect or bring other numerics in any order: every accepted request ends exactly
once, and a healthy one with the tokens of an undisturbed run. (The sink checks that positions are consecutive and that
each request ends once.)
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello
from tests.fakes import make_record, reference_tokens

from pagoda_engine_core.workers.executor import LeaveCause, StepDone, WorkerChanged, WorkerLeft, WorkerState
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason, RequestRecord

POISON = 66
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NO_BLAME = [cause for cause in LeaveCause if not cause.blames]


class Fleet:
    """Workers that join as an executor lets them, and die when they compute a poisoned row."""

    def __init__(self, **config: object) -> None:
        self.bench = Bench(**config)
        self.alive: dict[int, str] = {}  # epoch -> numerics id
        self.poisoned: dict[int, set[int]] = {}  # epoch -> ids of poisoned rows
        self.poison_deaths = 0
        self._last = 0

    def join(self, numerics_id: str = "a", num_blocks: int = 16) -> bool:
        held = self.bench.executor.held[-1:] or [""]
        needed = next(iter(self.alive.values()), held[0])
        if needed not in ("", numerics_id):
            return False
        self._last += 1
        hello = make_hello(f"w{self._last}", numerics_id=numerics_id, num_blocks=num_blocks)
        self.bench.executor.join(self._last, hello)
        self.bench.executor.held.append(numerics_id)  # until the engine core binds other numerics
        self.alive[self._last], self.poisoned[self._last] = numerics_id, set()
        return True

    def leave(self, epoch: int, cause: LeaveCause, step: int = 0) -> None:
        del self.alive[epoch]
        self.bench.executor.plans.pop(epoch)
        self.bench.executor.events.append(WorkerLeft(epoch, cause, "test", step))
        self.bench.engine.step(0)

    def answer(self, epoch: int) -> bool:
        """Compute the worker's oldest plan, or die if it has a poisoned row. False: there is no plan."""
        if not self.bench.executor.plans[epoch]:
            return False
        plan = self.bench.executor.plans[epoch].popleft()
        self.poisoned[epoch] |= {row.row_id for row in plan.new_rows if POISON in row.token_ids}
        if any(chunk.row_id in self.poisoned[epoch] for chunk in plan.chunks):
            self.poison_deaths += 1
            self.leave(epoch, LeaveCause.STEP_FAILED, plan.step)
        else:
            result = self.bench.executor.runners[epoch].execute(plan)
            self.bench.executor.events.append(StepDone(epoch, result))
        return True

    def settle(self) -> None:
        busy = True
        while busy:
            self.bench.clock.advance(0.05)
            busy = self.bench.engine.step(0)
            if not self.alive and not self.bench.engine.idle:
                busy |= self.join(*(self.bench.executor.held[-1:] if self.bench.executor.held[-1:] != [""] else []))
            busy |= any([self.answer(epoch) for epoch in list(self.alive)])  # noqa: C419 - every worker takes a step

    def disturb(self, data: st.DataObject, causes: list[LeaveCause]) -> None:
        epochs = sorted(self.alive)
        match data.draw(st.sampled_from(["join", "leave", "pause", "state", "answer", "answer", "step", "step"])):
            case "join":
                self.join(data.draw(st.sampled_from(["a", "a", "b"])))
            case "leave" if epochs:
                epoch, cause = data.draw(st.sampled_from(epochs)), data.draw(st.sampled_from(causes))
                self.leave(epoch, cause)
            case "pause":
                self.bench.clock.advance(data.draw(st.sampled_from([3.0, 600.0])))
                self.bench.engine.step(0)
            case "state" if epochs:
                state = data.draw(st.sampled_from([WorkerState.SUSPECT, WorkerState.READY]))
                self.bench.executor.events.append(WorkerChanged(data.draw(st.sampled_from(epochs)), state))
                self.bench.engine.step(0)
            case "answer" if epochs:
                self.answer(data.draw(st.sampled_from(epochs)))
            case _:
                self.bench.clock.advance(0.05)
                self.bench.engine.step(0)

    def recover(self) -> None:
        for epoch in self.alive:
            self.bench.executor.events.append(WorkerChanged(epoch, WorkerState.READY))
        self.settle()

    def check(self, records: list[RequestRecord]) -> None:
        sink = self.bench.sink
        for record in records:
            assert record.request_id in sink.endings, sink.rejections
            assert sink.endings[record.request_id].finish_reason is FinishReason.LENGTH
            assert sink.choices(record.request_id) == reference_tokens(record)
        assert self.bench.engine.idle
        assert self.bench.engine.stats().blocks.blocks_used == 0


def healthy(count: int) -> list[RequestRecord]:
    return [make_record(range(i + 1), max_tokens=6, n=1 + i % 2, seed=i, priority=i % 3 - 1) for i in range(count)]


@SETTINGS
@given(st.data())
def test_a_healthy_request_among_random_kills_never_fails(data: st.DataObject) -> None:
    fleet = Fleet(max_attempts=1000, policy=data.draw(st.sampled_from(["fcfs", "priority"])), max_rows=3)
    records = healthy(6)
    waiting = list(records)
    for _ in range(data.draw(st.integers(5, 60))):
        if waiting and data.draw(st.booleans()):
            fleet.bench.submit(waiting.pop())
        fleet.disturb(data, list(LeaveCause))
    for record in waiting:
        fleet.bench.submit(record)
    fleet.recover()
    fleet.check(records)


@SETTINGS
@given(st.data())
def test_poison_is_convicted_and_nobody_else(data: st.DataObject) -> None:
    """Workers also leave meanwhile, but only for causes that blame no request."""
    fleet = Fleet(max_rows=data.draw(st.sampled_from([2, 16])), chunk_size=data.draw(st.sampled_from([1, 64])))
    poison = make_record((POISON, 1), max_tokens=6)
    records = healthy(5)
    waiting = data.draw(st.permutations([*records, poison]))
    for _ in range(data.draw(st.integers(5, 60))):
        if waiting and data.draw(st.booleans()):
            fleet.bench.submit(waiting.pop())
        fleet.disturb(data, NO_BLAME)
    for record in waiting:
        fleet.bench.submit(record)
    fleet.recover()
    assert fleet.bench.sink.endings[poison.request_id].error_code is ErrorCode.REQUEST_FAILED_REPEATEDLY
    assert fleet.poison_deaths == 3
    fleet.check(records)
