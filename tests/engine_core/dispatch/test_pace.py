from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_engine_core.dispatch.pace import FIRST_STEPS, LEAD_SHARE, Pace
from pagoda_engine_core.dispatch.throughput import Throughput
from pagoda_proto.times import STEP_DEADLINE_FACTOR, STEP_DEADLINE_LEAST_S


def test_nothing_is_assumed_of_what_was_never_seen() -> None:
    assert Pace().step_s(1) == 0.0


def test_a_step_runs_once_those_before_it_are_answered() -> None:
    pace = Pace()
    pace.asked(512, 10.0)
    pace.asked(4, 10.0)
    assert pace.answered(10.5) == (512, 0.5)
    assert pace.answered(10.6) == (4, 10.6 - 10.5)
    pace.asked(4, 20.0)
    assert pace.answered(20.25) == (4, 0.25)


def test_between_sizes_that_were_seen_a_step_takes_no_longer_than_either_allows() -> None:
    pace = Pace()
    pace.observe(1, 0.01)
    pace.observe(1024, 0.8)
    assert pace.step_s(4) == 0.01 * 4
    assert pace.step_s(512) == 0.8
    assert pace.step_s(4096) == 0.8 * 4


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-4, 100)), min_size=1), st.integers(1, 100_000))
def test_a_prediction_lies_within_what_was_seen_and_its_ratio(steps: list[tuple[int, float]], num_tokens: int) -> None:
    pace = Pace()
    for size, seconds in steps:
        pace.observe(size, seconds)
    seen = [seconds for _, seconds in steps]
    assert min(seen) * 0.999 <= pace.step_s(num_tokens) <= max(seen) * 1.001 * max(1, num_tokens)


def test_a_step_under_way_while_we_did_not_run_is_no_slower_for_it() -> None:
    pace, now = Pace(), 0.0
    for _ in range(3):
        pace.asked(8, now)
        now += 1.0
        pace.answered(now)
    pace.asked(8, now)
    pace.asked(8, now)
    now += 600.0
    pace.forgive()
    assert pace.answered(now + 0.1) == (8, 0.0), "how long it took nobody knows"
    assert pace.answered(now + 0.2) == (8, 0.0)
    pace.asked(8, now + 0.2)
    assert pace.answered(now + 1.2) == (8, 1.0)
    assert pace.step_s(8) == 1.0


def test_a_rate_is_that_of_the_time_in_which_there_was_work() -> None:
    throughput = Throughput()
    now = 0.0
    for _ in range(3):
        for step in range(30):
            now += 0.1
            throughput.served(10, now, busy=step < 29)
        now += 1000.0
    assert 90 < throughput.tokens_per_s < 110


def test_one_step_is_no_rate() -> None:
    throughput = Throughput()
    throughput.served(2048, 5.0, busy=False)
    throughput.served(2048, 500.0, busy=False)
    assert throughput.tokens_per_s == 0


def test_time_in_which_we_did_not_run_lowers_no_rate() -> None:
    throughput = Throughput()
    throughput.served(10, 0.0, busy=True)
    throughput.served(50, 1.0, busy=True)
    throughput.forgive(600.0, 601.0)
    throughput.served(50, 602.0, busy=True)
    assert throughput.tokens_per_s == 50


def test_what_began_after_we_had_stood_still_began_then() -> None:
    throughput = Throughput()
    throughput.served(10, 600.0, busy=True)
    throughput.forgive(600.0, 600.1)  # most of this time was before the start
    for second in range(1, 4):
        throughput.served(50, 600.0 + second, busy=True)
    assert 40 < throughput.tokens_per_s < 60


def test_the_next_step_is_asked_for_shortly_before_it_is_needed() -> None:
    pace = Pace()
    assert pace.next_at() == 0.0, "of whom nothing is known, at once"
    pace.asked(8, 10.0)
    assert pace.next_at() == 0.0
    pace.answered(10.101, worked_s=0.1)
    pace.asked(8, 10.2)
    first = pace.next_at()
    assert first == pytest.approx(10.2 + 0.101 - 2 * 0.001 - LEAD_SHARE * 0.101)
    pace.asked(8, first)
    assert pace.next_at() > first + 0.07, "one more is not needed before the second is done, too"
    pace.forgive()
    assert pace.next_at() == 0.0, "how far it is nobody knows"


@pytest.mark.parametrize(("seconds", "worked_s"), [(0.3, 0.1), (0.002, 0.002)], ids=["far away", "short"])
def test_what_is_far_away_or_done_soon_is_asked_for_at_once(seconds: float, worked_s: float) -> None:
    pace = Pace()
    pace.asked(8, 10.0)
    pace.answered(10.0 + seconds, worked_s=worked_s)
    pace.asked(8, 20.0)
    assert pace.next_at() < 20.0


def test_a_trip_that_was_held_up_once_is_soon_forgotten() -> None:
    pace, now = Pace(), 0.0
    for trip_s in (0.5, 0.001, 0.5):
        pace.asked(8, now)
        pace.answered(now := now + 1.0 + trip_s, worked_s=1.0)
    pace.asked(8, now)
    assert pace.next_at() > now + 0.4


@given(st.floats(1e-4, 2.0), st.floats(0.0, 0.5), st.integers(1, 600))
def test_a_worker_never_waits_for_what_is_asked_late(seconds: float, delay_s: float, num_tokens: int) -> None:
    """All steps take the same time, and the link has the same delay in both directions."""
    pace, now = Pace(), 0.0
    pace.asked(num_tokens, now)
    pace.answered(now := now + 2 * delay_s + seconds, worked_s=seconds)
    pace.asked(num_tokens, now)
    free_at = now + delay_s + seconds  # when the worker becomes idle
    for _ in range(10):
        asked_at = max(now, pace.next_at())
        assert asked_at == now or asked_at + delay_s <= free_at, "at once, or in time"
        pace.asked(num_tokens, asked_at)
        now, free_at = free_at + delay_s, max(free_at, asked_at + delay_s) + seconds
        pace.answered(now, worked_s=seconds)


def test_a_step_is_hung_after_many_times_what_such_steps_take_once_that_is_known() -> None:
    pace = Pace()
    for _ in range(FIRST_STEPS):
        assert pace.deadline_s(8) == math.inf
        pace.observe(8, 1.0)
    assert pace.deadline_s(8) == STEP_DEADLINE_FACTOR


def test_a_stretch_in_which_we_did_not_run_puts_no_deadline_off() -> None:
    pace, now = Pace(), 0.0
    for _ in range(FIRST_STEPS):
        pace.asked(8, now)
        now += 0.05
        pace.answered(now)
    pace.asked(8, now)
    pace.forgive()
    pace.answered(now + 30.0)
    assert pace.deadline_s(8) == STEP_DEADLINE_LEAST_S
