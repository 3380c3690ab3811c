from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict

import pytest
from tests.engine_core.fake_worker import make_hello
from tests.engine_core.fakes_sink import RecordingSink, ResettableRunner
from tests.fakes import ManualClock, make_record
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import fake_runner

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.workers.executor import InprocExecutor, LeaveCause, StepDone, WorkerJoined, WorkerLeft
from pagoda_proto.records import RequestRecord
from pagoda_proto.steps import PROTOCOL_VERSION, Chunk, Drain, Hello, NewRow, ResetWorker, StepPlan, StepResult
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import ModelRunner


def plan(step: int, row_id: int = 1) -> StepPlan:
    record = make_record()
    row = NewRow(
        row_id=row_id,
        token_ids=record.prompt_token_ids,
        num_prompt_tokens=5,
        num_computed=0,
        block_ids=[0, 1],
        params=record.task.params,
        seed=0,
    )
    return StepPlan(step=step, new_rows=[row], chunks=[Chunk(row_id, 0, 5, True)])


def test_a_life_begins_with_the_first_wait_and_plans_are_answered_one_by_one() -> None:
    executor = InprocExecutor(ResettableRunner(), make_hello())
    (joined,) = executor.wait(0)
    assert isinstance(joined, WorkerJoined)
    executor.send(joined.epoch, plan(1))
    executor.send(joined.epoch, plan(2, row_id=2))
    for step in (1, 2):
        (done,) = executor.wait(0)
        assert isinstance(done, StepDone)
        assert (done.epoch, done.result.step) == (joined.epoch, step)
    assert executor.wait(0) == []
    assert executor.workers()[0].steps_done == 2


def test_a_runner_that_raises_has_failed_a_step_and_comes_back_empty() -> None:
    runner = ResettableRunner()
    executor = InprocExecutor(runner, make_hello())
    (joined,) = executor.wait(0)
    executor.send(joined.epoch, plan(1))
    executor.send(joined.epoch, plan(7, row_id=2))  # the wrong step number: FakeRunner raises
    executor.wait(0)
    left, again = executor.wait(0)
    assert isinstance(left, WorkerLeft)
    assert (left.epoch, left.cause, left.step) == (joined.epoch, LeaveCause.STEP_FAILED, 7)
    assert isinstance(again, WorkerJoined)
    assert again.epoch > joined.epoch
    assert not runner.rows
    executor.send(joined.epoch, plan(1, row_id=3))  # to the life that has ended
    assert executor.wait(0) == []


def test_who_is_interrupted_in_a_step_begins_anew_without_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ResettableRunner()
    executor = InprocExecutor(runner, make_hello())
    (joined,) = executor.wait(0)
    executor.send(joined.epoch, plan(1))
    executor.send(joined.epoch, plan(2, row_id=2))

    def interrupted(_: StepPlan) -> StepResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runner, "launch", interrupted)
        executor.wait(0)
    left, again = executor.wait(0)
    assert (left.epoch, left.cause) == (joined.epoch, LeaveCause.LEFT)
    executor.send(again.epoch, plan(1))
    (done,) = executor.wait(0)
    assert done.result.step == 1


def test_reset_and_drain_end_a_life_without_blame() -> None:
    executor = InprocExecutor(ResettableRunner(), make_hello())
    (first,) = executor.wait(0)
    executor.send(first.epoch, ResetWorker())
    left, second = executor.wait(0)
    assert left.cause is LeaveCause.RESET
    executor.send(second.epoch, Drain())
    (left,) = executor.wait(0)
    assert left.cause is LeaveCause.LEFT
    assert executor.workers() == []


def test_wake_ends_a_wait_from_another_thread() -> None:
    executor = InprocExecutor(ResettableRunner(), make_hello())
    executor.wait(0)
    done = threading.Event()

    def wait() -> None:
        executor.wait(60)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    executor.wake()
    assert done.wait(10)
    thread.join()


class Watched:
    """A runner that records its calls, and fails in the `lost`-th calls of `collect`, as if the device were lost."""

    def __init__(self, runner: ModelRunner, lost: tuple[int, ...] = ()) -> None:
        self._runner, self._lost = runner, lost
        self.depth, self.reset = runner.depth, runner.reset
        self.journal: list[tuple[str, int]] = []

    def launch(self, plan: StepPlan) -> Pending:
        self.journal.append(("launch", plan.step))
        return self._runner.launch(plan)

    def collect(self, pending: Pending) -> StepResult:
        self.journal.append(("collect", pending.step))
        if sum(what == "collect" for what, _ in self.journal) in self._lost:
            raise RuntimeError("lost")
        return self._runner.collect(pending)


def run(runner: Watched, facts: object, records: list[RequestRecord]) -> RecordingSink:
    hello = Hello(
        protocol=PROTOCOL_VERSION, worker_id="w", incarnation="1", registration=1, host_id="", pid=0,
        **asdict(facts),  # type: ignore[call-overload]
    )  # fmt: skip
    engine, sink = EngineCore(EngineConfig(max_attempts=9), InprocExecutor(runner, hello)), RecordingSink()
    for record in records:
        engine.submit(record, sink)
    while not engine.idle:
        engine.step(0)
    engine.close()
    return sink


@pytest.mark.parametrize("lost", [(), (4, 9)])
def test_a_device_has_its_next_step_before_the_last_one_is_waited_for(lost: tuple[int, ...]) -> None:
    """The tokens equal those of one step at a time, also for rows whose tokens only the host can choose."""
    records = [
        make_record(range(3, 5 + 4 * i), temperature=float(i == 2), max_tokens=9 - i, seed=i, request_id=f"r{i}")
        for i in range(5)
    ]
    plain, device = fake_runner(), fake_runner(accelerator=FakeAccelerator())
    expected, found = Watched(plain), Watched(device, lost)
    one_by_one, ahead = run(expected, plain.facts, records), run(found, device.facts, records)
    for record in records:
        assert ahead.choices(record.request_id) == one_by_one.choices(record.request_id)
        assert len(ahead.choices(record.request_id)[0]) == record.task.params.max_tokens
    assert expected.journal[:4] == [("launch", 1), ("collect", 1), ("launch", 2), ("collect", 2)]
    assert found.journal[:5] == [("launch", 1), ("launch", 2), ("collect", 1), ("launch", 3), ("collect", 2)]


class Slow(ResettableRunner):
    def __init__(self, clock: ManualClock, step_s: float) -> None:
        super().__init__()
        self._advance: Callable[[], None] = lambda: clock.advance(step_s)

    def launch(self, plan: StepPlan) -> StepResult:
        self._advance()
        return super().launch(plan)


@pytest.mark.parametrize("step_s", [0.5, 2.0])
def test_whoever_waits_is_refused_in_time_however_long_a_step_takes_in_here(step_s: float) -> None:
    clock, sink = ManualClock(1000.0), RecordingSink()
    executor = InprocExecutor(Slow(clock, step_s), make_hello())
    engine = EngineCore(EngineConfig(max_rows=1, queue_timeout_s=10.0), executor, clock)
    first, second = make_record(max_tokens=60), make_record()
    for record in (first, second):
        engine.submit(record, sink)
    while second.request_id not in sink.endings:
        engine.step(0)
    assert 10.0 <= clock() - 1000.0 <= 10.0 + 2 * step_s
    assert first.request_id not in sink.endings
