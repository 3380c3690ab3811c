"""A request that would wait longer than it may is refused at once, judged by the throughput while others waited."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello
from tests.fakes import make_pool_record, make_record

from pagoda_engine_core.dispatch.answers import Full
from pagoda_engine_core.dispatch.fairness import Fairness
from pagoda_engine_core.dispatch.pace import FIRST_STEPS
from pagoda_engine_core.dispatch.policy import POLICIES
from pagoda_engine_core.dispatch.waiting import Rank, WaitingQueue
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.workers.executor import LeaveCause, WorkerLeft
from pagoda_proto.errors import ErrorCode
from pagoda_proto.pooling.params import EMBED
from pagoda_proto.times import STEP_DEADLINE_LEAST_S

STEP_S = 0.2


def work(bench: Bench, until: Callable[[], bool], least_s: float = 0.0) -> None:
    """Run step by step until `until()` holds and `least_s` have passed."""
    began = bench.clock()
    while not until() or bench.clock() - began < least_s:
        bench.executor.answer_all()
        bench.clock.advance(STEP_S)
        bench.engine.step(0)


def crowded(policy: str = "fcfs", queue_timeout_s: float = 10.0) -> Bench:
    """An engine core with two rows and answers of 10 tokens that has had a queue: each request takes about a second."""
    bench = Bench(max_rows=2, policy=policy, queue_timeout_s=queue_timeout_s)
    bench.executor.join(1, make_hello())
    for seed in range(8):
        bench.submit(make_record(max_tokens=10, seed=seed))
    work(bench, lambda: len(bench.sink.endings) == 8)
    return bench


def flood(bench: Bench, count: int, tenant: str = "") -> list[str]:
    asked = [bench.submit(make_record(max_tokens=10, seed=seed, tenant=tenant)) for seed in range(count)]
    bench.engine.step(0)
    return asked


def test_who_would_wait_for_too_long_is_refused_and_nobody_else_is_kept_waiting_for_so_long() -> None:
    bench = crowded()
    asked = flood(bench, 60)
    refused = set(bench.sink.rejections)
    assert 20 < len(refused) < 55
    assert refused == set(asked[-len(refused) :])
    for request_id in refused:
        error = bench.sink.rejections[request_id]
        assert error.code is ErrorCode.OVERLOADED
        assert "would begin in about" in error.message
        assert 5 < bench.sink.retry_after_s[request_id] < 60
    work(bench, lambda: len(bench.sink.endings) == 8 + 60 - len(refused))
    late = [ending for ending in bench.sink.endings.values() if ending.error_code is not None]
    assert len(late) <= 3, "what was let in began in time, but for what is between told and true"


def test_nobody_who_can_begin_is_refused_however_slow_a_crowd_once_was() -> None:
    """As after a restart on a busy machine: all clients return at once, and the steps that leave some of them waiting
    for the next one are slow."""
    bench = Bench(max_rows=8, max_tokens_per_step=8, queue_timeout_s=10.0)
    bench.executor.join(1, make_hello())
    for seed in range(4):
        bench.submit(make_record(range(1, 8), max_tokens=60, seed=seed))
    for _ in range(4):
        bench.pass_time(2.0)
        bench.executor.answer_all()
        bench.engine.step(0)
    assert 0 < bench.engine.admission._crowded.tokens_per_s < 10
    asked = flood(bench, 3)
    assert not bench.sink.rejections
    work(bench, lambda: set(asked) <= set(bench.sink.endings))
    assert all(ending.error_code is None for ending in bench.sink.endings.values())


def test_nobody_is_refused_for_rows_that_have_become_free() -> None:
    """Free rows are assigned when the next step is planned, which does not happen before it is due."""
    bench = Bench(max_rows=3, queue_timeout_s=3.0)
    bench.executor.worked_s = STEP_S
    bench.executor.join(1, make_hello())
    bench.submit(make_record(max_tokens=4))
    work(bench, lambda: bench.engine.idle)
    bench.engine.admission.served(10, 0.0, busy=True, crowded=True)
    bench.engine.admission.served(2, 2.0, busy=True, crowded=True)
    for num_tokens in (4, 4, 40):
        bench.submit(make_record(max_tokens=num_tokens))
    bench.engine.step(0)
    bench.submit(make_record(max_tokens=9))
    while len(bench.sink.endings) < 3:
        for _ in range(10):
            bench.clock.advance(STEP_S / 10)
            bench.engine.step(0)
        bench.executor.answer_all()
        bench.engine.step(0)
    assert bench.engine._router.num_waiting == 1, "the next one is not due yet"
    bench.submit(make_record(max_tokens=9))
    bench.engine.step(0)
    assert not bench.sink.rejections


def test_what_reads_is_not_expected_to_write() -> None:
    bench = Bench(max_rows=2, queue_timeout_s=10.0)
    bench.executor.join(1, make_hello(pools=(EMBED,), pooled_width=2))
    bench.settle()
    bench.engine.admission.served(10, 0.0, busy=True, crowded=True)
    bench.engine.admission.served(20, 2.0, busy=True, crowded=True)
    for _ in range(8):
        bench.submit(make_pool_record())
    bench.engine.step(0)
    assert not bench.sink.rejections


def test_a_machine_that_was_asleep_is_not_taken_for_a_slow_one() -> None:
    """The workers' answers arrive with the first pass after the sleep."""
    bench = Bench(max_rows=2, queue_timeout_s=10.0)
    bench.executor.join(1, make_hello())
    flood(bench, 4)
    work(bench, lambda: bench.clock() > 1001.0)
    bench.executor.answer_all()
    bench.clock.advance(600.0)
    bench.engine.step(0)
    flood(bench, 4)
    assert not bench.sink.rejections
    work(bench, lambda: len(bench.sink.endings) == 8)


def test_the_loss_of_a_worker_is_not_taken_for_slowness() -> None:
    """The lost worker's step yields no token, and the next worker joins some time later."""
    bench = Bench(max_rows=2, queue_timeout_s=10.0)
    bench.executor.join(1, make_hello())
    flood(bench, 4)
    work(bench, lambda: bench.clock() > 1001.5)
    bench.executor.events.append(WorkerLeft(1, LeaveCause.DIED, "killed"))
    work(bench, lambda: bench.clock() > 1060.0)
    bench.executor.join(2, make_hello("next"))
    work(bench, lambda: bench.clock() > 1061.0)
    flood(bench, 20)
    assert not bench.sink.rejections
    work(bench, lambda: len(bench.sink.endings) == 24)


@pytest.mark.parametrize("slept", ["everything", "the worker"])
def test_a_worker_under_whom_the_machine_slept_has_its_share_afterwards(slept: str) -> None:
    bench = Bench()
    for epoch in (1, 2):
        bench.executor.join(epoch, make_hello(f"w{epoch}"))
    flood(bench, 8)
    work(bench, lambda: bench.clock() > 1001.0)
    if slept == "everything":
        bench.clock.advance(600.0)
    else:
        for _ in range(100):
            bench.executor.answer(2)
            bench.clock.advance(0.25)
            bench.engine.step(0)
    work(bench, lambda: len(bench.sink.endings) == 8)
    before = [bench.executor.runners[epoch].tokens_computed for epoch in (1, 2)]
    for _ in range(3):
        more = [bench.submit(make_record(max_tokens=20, seed=seed)) for seed in range(8)]
        work(bench, lambda: all(name in bench.sink.endings for name in more))  # noqa: B023 - it is called at once
    one, two = (bench.executor.runners[epoch].tokens_computed - was for epoch, was in zip((1, 2), before, strict=True))
    assert one > two / 3


def test_a_worker_whose_pace_is_known_is_given_no_more_time_than_that_allows() -> None:
    """The same after the machine was asleep."""
    bench = Bench()
    bench.executor.join(1, make_hello())
    bench.submit(make_record(max_tokens=FIRST_STEPS + 10))
    work(bench, lambda: len(bench.executor.deadlines_s) > FIRST_STEPS + 2)
    assert bench.executor.deadlines_s[0] == math.inf
    assert bench.executor.deadlines_s[-1] == STEP_DEADLINE_LEAST_S
    bench.executor.answer_all()
    bench.clock.advance(600.0)
    work(bench, lambda: bench.engine.idle)
    assert set(bench.executor.deadlines_s[FIRST_STEPS + 2 :]) == {STEP_DEADLINE_LEAST_S}


def test_a_requests_own_time_is_what_counts() -> None:
    bench = crowded(queue_timeout_s=1e6)
    flood(bench, 60)
    assert not bench.sink.rejections
    hasty = bench.submit(make_record(queue_timeout_s=2.0))
    patient = bench.submit(make_record(queue_timeout_s=600.0))
    bench.engine.step(0)
    assert set(bench.sink.rejections) == {hasty}
    assert (patient, 0) in bench.sink.accepted_ids


def test_the_tighter_of_two_patiences_holds() -> None:
    bench = crowded(queue_timeout_s=10.0)
    for seed in range(60):
        bench.submit(make_record(max_tokens=10, seed=seed))
    asked = [bench.submit(make_record(queue_timeout_s=600.0)), bench.submit(make_record(queue_timeout_s=2.0))]
    bench.engine.step(0)
    told = [bench.sink.rejections[request_id].message for request_id in asked]
    assert ["may wait 10 s" in told[0], "may wait 2 s" in told[1]] == [True, True]


@pytest.mark.parametrize(("asked_s", "ends_after_s"), [(600.0, 5.0), (1.0, 1.0), (0.0, 5.0)])
@pytest.mark.parametrize("queued", [True, False])
def test_who_cannot_begin_ends_when_the_tighter_one_is_over(asked_s: float, ends_after_s: float, queued: bool) -> None:
    bench = Bench(queue_timeout_s=5.0)
    if queued:
        bench.executor.join(1, make_hello())
        bench.settle()
        bench.executor.events.append(WorkerLeft(1, LeaveCause.LEFT, "gone"))
        bench.engine.step(0)
    asked = bench.submit(make_record(queue_timeout_s=asked_s))
    bench.settle()
    bench.pass_time(ends_after_s - 0.5)
    assert not {**bench.sink.rejections, **bench.sink.endings}
    bench.pass_time(1.0)
    assert asked in {**bench.sink.rejections, **bench.sink.endings}


def test_sec_17_nothing_stays_of_who_is_refused_until_garbage_is_looked_for() -> None:
    bench = crowded()
    gc.collect()
    gc.disable()
    try:
        assert flood(bench, 60)[-1] in bench.sink.rejections
        for error in bench.sink.rejections.values():
            error.__traceback__ = None  # its frames hold the request as long as the sink holds the error
        made = {each.request_id for each in gc.get_objects() if type(each) is Request}
        assert made.isdisjoint(bench.sink.rejections)
    finally:
        gc.enable()


def test_a_refusal_is_of_all_unless_its_own_size_is_why() -> None:
    bench = crowded()
    refused = bench.sink.rejections[flood(bench, 60)[-1]]
    assert isinstance(refused, Full), "the line is too long for anybody"
    many = Bench(max_queued_requests=2)
    assert isinstance(many.sink.rejections[flood(many, 3)[-1]], Full)
    large = Bench(max_queued_tokens=4)
    asked = large.submit(make_record(range(5)))
    large.engine.step(0)
    assert large.sink.rejections[asked].code is ErrorCode.OVERLOADED
    assert not isinstance(large.sink.rejections[asked], Full)


def test_what_one_alone_got_done_says_nothing_of_a_crowd() -> None:
    bench = Bench(max_rows=64, queue_timeout_s=1.0)
    bench.executor.join(1, make_hello(max_rows=64))
    alone = bench.submit(make_record(max_tokens=40))
    work(bench, lambda: alone in bench.sink.endings)
    flood(bench, 100)
    assert not bench.sink.rejections


def test_a_tenants_flood_refuses_nobody_else_where_turns_are_fair() -> None:
    bench = crowded("fair")
    flood(bench, 60, "flood")
    small = bench.submit(make_record(tenant="small"))
    again = flood(bench, 10, "flood")
    assert len(set(again) & set(bench.sink.rejections)) > 5
    assert small not in bench.sink.rejections


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=30, deadline=None)
@given(priorities=st.lists(st.integers(0, 3), max_size=12), mine=st.integers(0, 3))
def test_who_is_ahead_is_known_before_one_comes(policy: str, priorities: list[int], mine: int) -> None:
    queue = WaitingQueue(POLICIES[policy], Fairness(counting=False))
    for priority in priorities:
        queue.add(request(priority), Rank.NEW, 0.0)
    new = request(mine)
    ahead = queue.ahead_of(new, Rank.NEW)
    queue.add(new, Rank.NEW, 0.0)
    before = [queued.request for queued in queue]
    assert ahead.num_requests == before.index(new)
    assert ahead.num_tokens == 3 * ahead.num_requests


def request(priority: int) -> Request:
    return Request(make_record((1, 2, 3), priority=priority), max_output_tokens=4, now=0.0)
