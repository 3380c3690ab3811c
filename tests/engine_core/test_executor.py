from __future__ import annotations

import threading

from tests.engine_core.fake_worker import make_hello
from tests.engine_core.fakes_sink import ResettableRunner
from tests.fakes import make_record

from pagoda_engine_core.executor import InprocExecutor, LeaveCause, StepDone, WorkerJoined, WorkerLeft
from pagoda_proto.steps import Chunk, Drain, NewRow, ResetWorker, StepPlan


def plan(step: int, row_id: int = 1) -> StepPlan:
    record = make_record()
    row = NewRow(
        row_id=row_id,
        token_ids=record.prompt_token_ids,
        num_prompt_tokens=5,
        num_computed=0,
        block_ids=[0, 1],
        params=record.params,
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


def test_a_runner_that_raises_has_died_and_comes_back_empty() -> None:
    runner = ResettableRunner()
    executor = InprocExecutor(runner, make_hello())
    (joined,) = executor.wait(0)
    executor.send(joined.epoch, plan(1))
    executor.send(joined.epoch, plan(7, row_id=2))  # not the step that is due: FakeRunner raises
    executor.wait(0)
    left, again = executor.wait(0)
    assert isinstance(left, WorkerLeft)
    assert (left.epoch, left.cause) == (joined.epoch, LeaveCause.DIED)
    assert isinstance(again, WorkerJoined)
    assert again.epoch > joined.epoch
    assert not runner.rows
    executor.send(joined.epoch, plan(1, row_id=3))  # to the dead life
    assert executor.wait(0) == []


def test_reset_and_drain_end_a_life_without_blame() -> None:
    executor = InprocExecutor(ResettableRunner(), make_hello())
    (first,) = executor.wait(0)
    executor.send(first.epoch, ResetWorker())
    left, second = executor.wait(0)
    assert left.cause is LeaveCause.LEFT
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
