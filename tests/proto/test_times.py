"""The ladder: whoever waits waits longer than what it waits for can take."""

from __future__ import annotations

from pagoda_proto import times
from pagoda_proto.times import StallGuard


def test_a_worker_is_suspected_then_given_up_then_gives_up_itself() -> None:
    assert 2 * times.BEAT_S < times.WORKER_SUSPECT_S < times.WORKER_DEAD_S < times.WORKER_LEASE_S
    assert times.WORKER_LEASE_S < times.STUCK_EXIT_S < times.STEP_DEADLINE_S
    assert times.WORKER_LEASE_S < times.STEP_DEADLINE_LEAST_S < times.STEP_DEADLINE_S


def test_an_engine_core_is_found_silent_only_after_several_reports_are_missing() -> None:
    assert 3 * times.LOAD_KEEPALIVE_S < times.ENGINE_SILENT_S < times.LOOP_STUCK_S < times.CHILD_SILENT_S
    assert 3 * times.CHILD_BEAT_S < times.CHILD_SILENT_S


def test_an_engine_core_on_its_way_down_is_gone_before_it_would_be_taken_for_silent() -> None:
    assert times.HAND_BACK_S + times.SESSIONS_END_S + times.THREAD_ENDS_S < times.CHILD_SILENT_S


def test_streams_outwait_an_engine_core_that_is_found_silent_replaced_and_started() -> None:
    replaced_s = times.CHILD_SILENT_S + times.RESTART_MOST_S + times.START_S
    assert replaced_s - times.ENGINE_SILENT_S < times.RESUME_WAIT_S


def test_streams_outwait_a_worker_that_is_found_silent_replaced_and_started() -> None:
    assert times.WORKER_SILENT_S + times.RESTART_MOST_S + times.START_S < times.NO_WORKER_WAIT_S


def test_a_watcher_that_was_held_up_says_for_how_long() -> None:
    guard = StallGuard(due_s=0.5, now=10.0)
    assert guard.tick(10.5) == 0.0
    assert guard.tick(10.5 + 0.5 + times.STALL_S) == 0.0
    assert guard.tick(20.0) == 20.0 - 12.0
