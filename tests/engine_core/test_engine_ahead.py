"""A step is planned as late as possible without idling the worker, so that requests arriving until then are in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello
from tests.fakes import make_record, reference_tokens

from pagoda_engine_core.workers.executor import InprocExecutor
from pagoda_proto.steps import StepPlan

STEP_S = 0.1
MOMENT_S = 0.001


@pytest.fixture
def bench() -> Bench:
    """An engine core that knows how long its worker's steps take."""
    bench = Bench()
    bench.executor.join(1, make_hello())
    bench.executor.worked_s = STEP_S
    bench.settle()
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    while bench.executor.plans[1]:
        answer(bench)
    return bench


def answer(bench: Bench, seconds: float = STEP_S) -> None:
    """Finish the running step after `seconds`."""
    bench.clock.advance(seconds)
    bench.executor.answer(1)
    bench.engine.step(0)
    bench.clock.advance(MOMENT_S)
    bench.engine.step(0)


def rows_begun(bench: Bench) -> list[int]:
    """Number of new rows in each plan so far."""
    return [len(message.new_rows) for _, message in bench.executor.sent if isinstance(message, StepPlan)]


def test_who_comes_while_a_step_runs_is_in_the_next_one(bench: Bench) -> None:
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 1, "the next one is not needed yet"
    begun = len(rows_begun(bench))
    bench.clock.advance(0.5 * STEP_S)
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 1
    bench.clock.advance(0.3 * STEP_S)
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 2
    assert rows_begun(bench)[begun:] == [1]
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 2


def test_it_wakes_when_the_next_step_is_due(bench: Bench) -> None:
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    bench.executor.waits_s.clear()
    bench.engine.step(1.0)
    assert 0.5 * STEP_S < bench.executor.waits_s[-1] < 0.8 * STEP_S
    bench.clock.advance(bench.executor.waits_s[-1])
    bench.engine.step(1.0)
    assert bench.executor.waits_s[-1] == 1.0, "planned, and nothing else is due"


@pytest.mark.parametrize("seconds", [0.5 * STEP_S, 0.9 * STEP_S])
def test_what_takes_long_before_it_waits_is_no_reason_to_wake_late(bench: Bench, seconds: float) -> None:
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    due_at = bench.engine._router.next_after(bench.clock())
    bench.engine.call(lambda: bench.clock.advance(seconds))
    bench.engine.step(1.0)
    assert bench.executor.waits_s[-1] == max(0.0, due_at - bench.clock())
    bench.clock.advance(bench.executor.waits_s[-1])
    bench.engine.step(1.0)
    assert len(bench.executor.plans[1]) == 2


def test_a_step_that_is_done_sooner_is_followed_at_once(bench: Bench) -> None:
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    bench.executor.answer(1)
    bench.clock.advance(0.1 * STEP_S)
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 1


def test_who_comes_while_rows_are_dropped_is_planned_at_once(bench: Bench) -> None:
    """As with one client that asks again: the last step of its previous request computes nothing."""
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    while not bench.engine.idle:
        answer(bench)
    assert [plan.num_tokens for plan in bench.executor.plans[1]] == [0]
    bench.submit(make_record(max_tokens=8))
    bench.engine.step(0)
    assert len(bench.executor.plans[1]) == 2


def test_what_is_computed_while_we_wait_is_planned_at_once() -> None:
    """An executor that computes while we wait leaves nobody to plan the next step in time."""
    assert not InprocExecutor.concurrent


@given(st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(0, 2)), min_size=1, max_size=60))
def test_whenever_answers_and_requests_come_all_are_answered(story: list[tuple[float, int]]) -> None:
    bench = Bench(max_rows=4)
    bench.executor.join(1, make_hello())
    bench.executor.worked_s = STEP_S
    records = []
    for seconds, what in story:
        bench.clock.advance(seconds)
        if what == 0:
            records.append(make_record(max_tokens=5, seed=len(records)))
            bench.submit(records[-1])
        elif what == 1:
            bench.executor.answer(1)
        bench.engine.step(0)
        assert len(bench.executor.plans[1]) <= 2
    for _ in range(200):
        answer(bench)
    for record in records:
        assert bench.deltas(record.request_id) == reference_tokens(record)
    assert bench.engine.idle
