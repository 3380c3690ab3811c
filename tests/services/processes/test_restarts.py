"""Pauses between the lives of a child, in simulated time."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.processes.restarts import CRASH_LOOP, Lives, Pauses
from pagoda_proto import times

KILLED = -int(signal.SIGKILL)
PAUSES = Pauses(first_s=0.1, most_s=2.0, never_up_first_s=0.5, never_up_most_s=30.0)


def live(lives: Lives, now: float, *, up_after_s: float | None, lasts_s: float, code: int = KILLED) -> float:
    """One life; returns the pause after it."""
    lives.begin(now)
    if up_after_s is not None:
        lives.come_up(now + up_after_s)
    return lives.end(now + lasts_s, code)


def killed_every(period_s: float, start_s: float, until_s: float) -> tuple[Lives, float]:
    """A child needs `start_s` to come up and is killed every `period_s`; returns also how long it was up in total."""
    lives, now, up_s = Lives(PAUSES), 0.0, 0.0
    while now < until_s:
        kill_at = (now // period_s + 1) * period_s
        lives.begin(now)
        if now + start_s < kill_at:
            lives.come_up(now + start_s)
            up_s += kill_at - now - start_s
        now = kill_at + lives.end(kill_at, KILLED)
    return lives, up_s


@pytest.mark.parametrize(
    ("period_s", "start_s", "share"), [(2.0, 1.0, 0.4), (2.0, 0.3, 0.7), (6.0, 2.0, 0.6), (3.0, 1.5, 0.4)]
)
def test_one_that_is_killed_on_a_beat_works_in_between(period_s: float, start_s: float, share: float) -> None:
    lives, up_s = killed_every(period_s, start_s, 60.0)
    assert up_s > 60.0 * share
    assert lives.in_crash_loop


def test_a_start_that_is_never_finished_before_the_next_kill_is_tried_on() -> None:
    lives, up_s = killed_every(2.0, 3.0, 60.0)
    assert up_s == 0
    assert live(lives, 60.0, up_after_s=None, lasts_s=2.0) == 0.0


@pytest.mark.parametrize("up_after_s", [0.0, None])
def test_one_that_is_killed_at_once_waits_longer_each_time(up_after_s: float | None) -> None:
    lives = Lives(PAUSES)
    pauses = [live(lives, 0.0, up_after_s=up_after_s, lasts_s=0.0) for _ in range(7)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_one_that_fails_before_it_is_up_waits_much_longer() -> None:
    lives = Lives(PAUSES)
    pauses = [live(lives, 0.0, up_after_s=None, lasts_s=5.0, code=1) for _ in range(8)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    live(lives, 0.0, up_after_s=1.0, lasts_s=1.0, code=1)
    assert live(lives, 0.0, up_after_s=None, lasts_s=5.0, code=1) == 0.5


def test_a_long_life_is_a_new_beginning() -> None:
    lives = Lives(PAUSES)
    for _ in range(CRASH_LOOP):
        live(lives, 0.0, up_after_s=0.1, lasts_s=0.2)
    assert lives.in_crash_loop
    assert live(lives, 0.0, up_after_s=0.1, lasts_s=times.STEADY_S + 1) == 0.0
    assert lives.deaths_in_a_row == 1
    assert not lives.in_crash_loop


def test_it_was_up_for_ever_once_it_was() -> None:
    lives = Lives(PAUSES)
    live(lives, 0.0, up_after_s=None, lasts_s=1.0)
    assert not lives.was_up
    live(lives, 0.0, up_after_s=1.0, lasts_s=2.0)
    live(lives, 0.0, up_after_s=None, lasts_s=1.0)
    assert lives.was_up


LIFE = st.tuples(st.none() | st.floats(0, 5), st.floats(5, 100), st.sampled_from([KILLED, -11, 0, 1]))


@given(st.lists(LIFE, max_size=30))
def test_every_pause_is_within_its_bounds(given_lives: list[tuple[float | None, float, int]]) -> None:
    lives = Lives(PAUSES)
    for up_after_s, lasts_s, code in given_lives:
        pause_s = live(lives, 0.0, up_after_s=up_after_s, lasts_s=lasts_s, code=code)
        failed = up_after_s is None and code != KILLED
        least_s, most_s = (PAUSES.never_up_first_s, PAUSES.never_up_most_s) if failed else (0.0, PAUSES.most_s)
        assert least_s <= pause_s <= most_s


@given(st.integers(1, 10**9))
def test_any_number_of_deaths_has_a_pause(deaths: int) -> None:
    assert PAUSES.of_one_that_was_up(deaths, 0.0) <= 2.0
    assert PAUSES.of_one_that_failed(deaths) <= 30.0
