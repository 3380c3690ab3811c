from __future__ import annotations

from pagoda_proto.times import STUCK_EXIT_S
from pagoda_worker.process.control import IDLE_INTERVAL_S, StuckWatch

TICK_S = IDLE_INTERVAL_S


def first_stuck(watch: StuckWatch, now: float, until: float) -> float | None:
    """When a watch, polled regularly, reports a stuck step after its membership was lost."""
    while now < until:
        now += TICK_S
        if watch.stuck(now, lost_and_busy=True):
            return now
    return None


def test_a_step_is_stuck_when_it_has_run_on_for_long_since_its_membership_was_lost() -> None:
    watch = StuckWatch(0.0)
    for tick in range(1000):  # the time before the loss does not count
        assert not watch.stuck(tick * TICK_S, lost_and_busy=False)
    lost_at = 1000 * TICK_S
    found = first_stuck(watch, lost_at, lost_at + 2 * STUCK_EXIT_S)
    assert found is not None
    assert STUCK_EXIT_S < found - lost_at < STUCK_EXIT_S + 3 * TICK_S


def test_time_in_which_the_watcher_did_not_run_does_not_count() -> None:
    watch = StuckWatch(0.0)
    assert not watch.stuck(TICK_S, lost_and_busy=True)
    woken_at = TICK_S + 10 * STUCK_EXIT_S
    assert not watch.stuck(woken_at, lost_and_busy=True)
    assert first_stuck(watch, woken_at, woken_at + STUCK_EXIT_S / 2) is None
    assert first_stuck(watch, woken_at + STUCK_EXIT_S / 2, woken_at + 2 * STUCK_EXIT_S) is not None


def test_a_membership_lost_while_the_watcher_was_held_up_is_found_only_afterwards() -> None:
    watch = StuckWatch(0.0)
    assert not watch.stuck(TICK_S, lost_and_busy=False)
    assert not watch.stuck(10 * STUCK_EXIT_S, lost_and_busy=True)


def test_a_step_that_ends_begins_the_count_anew() -> None:
    watch = StuckWatch(0.0)
    assert first_stuck(watch, 0.0, STUCK_EXIT_S - 1) is None
    assert not watch.stuck(STUCK_EXIT_S, lost_and_busy=False)
    assert first_stuck(watch, STUCK_EXIT_S, 2 * STUCK_EXIT_S - 1) is None
