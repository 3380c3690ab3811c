"""The ladder of timeouts: each lasts longer than what it waits for can take."""

from __future__ import annotations

from pagoda_proto import times
from pagoda_proto.times import LivedClock, StallGuard


def test_a_worker_is_suspected_then_given_up_then_gives_up_itself() -> None:
    assert 2 * times.BEAT_S < times.WORKER_SUSPECT_S < times.WORKER_DEAD_S < times.WORKER_LEASE_S
    assert times.WORKER_LEASE_S < times.STUCK_EXIT_S < times.STEP_DEADLINE_S
    assert times.WORKER_LEASE_S < times.STEP_DEADLINE_LEAST_S < times.STEP_DEADLINE_S
    assert 2 * times.LONGEST_STEP_S < times.STEP_DEADLINE_LEAST_S, "a step twice as slow as thought is not hung"


def test_an_engine_core_is_found_silent_only_after_several_reports_are_missing() -> None:
    assert 2 * times.LOAD_KEEPALIVE_S < times.ENGINE_SUSPECT_S < times.ENGINE_SILENT_S
    assert 3 * times.LOAD_KEEPALIVE_S < times.ENGINE_SILENT_S < times.LOOP_STUCK_S < times.CHILD_SILENT_S
    assert times.STEP_DEADLINE_S < times.ENGINE_STUCK_S, "an engine core has let go of a hung worker before it is left"
    assert 3 * times.CHILD_BEAT_S < times.CHILD_SILENT_S
    assert times.REPORT_AGE_S < times.REPORT_WAIT_S < times.ENGINE_SILENT_S


def test_an_engine_core_on_its_way_down_is_gone_before_it_would_be_taken_for_silent() -> None:
    assert times.HAND_BACK_S + times.SESSIONS_END_S + times.THREAD_ENDS_S < times.CHILD_SILENT_S


def test_streams_outwait_an_engine_core_that_is_found_silent_replaced_and_started() -> None:
    replaced_s = times.CHILD_SILENT_S + times.RESTART_MOST_S + times.START_S
    assert replaced_s - times.ENGINE_SILENT_S < times.RESUME_WAIT_S


def test_a_child_is_judged_by_several_beats_and_looked_at_often_enough() -> None:
    assert 3 * times.CHILD_BEAT_S < times.CHILD_SILENT_S < times.FIRST_WORD_S <= times.WORKER_SILENT_S
    assert times.WATCH_S + times.STALL_S < times.CHILD_SILENT_S / 2
    assert times.CHILD_BEAT_S + times.STALL_S < times.CHILD_SILENT_S / 2


def test_who_worked_is_back_sooner_than_who_never_did() -> None:
    assert times.RESTART_FIRST_S < times.RESTART_NEVER_UP_FIRST_S < times.RESTART_MOST_S
    assert times.RESTART_MOST_S < times.STEADY_S < times.RESTART_NEVER_UP_MOST_S
    assert times.RESTART_MOST_S < times.ENGINE_SILENT_S


def test_streams_outwait_a_worker_that_is_found_silent_replaced_and_started() -> None:
    assert times.WORKER_SILENT_S + times.RESTART_MOST_S + times.START_S < times.NO_WORKER_WAIT_S


def test_a_process_ends_over_a_grammar_before_it_is_given_up() -> None:
    assert times.GRAMMAR_COMPUTE_S < times.GRAMMAR_CHECK_S
    assert times.GRAMMAR_CHECK_S + times.STALL_S < times.GRAMMAR_SILENT_S < times.SUBMIT_WAIT_S


def test_a_call_to_the_store_outwaits_a_locked_file_and_is_tried_again_while_clients_retry() -> None:
    assert times.STORE_LOCKED_S < times.STORE_CALL_S < times.STORE_REST_MOST_S < times.RESUME_WAIT_S
    assert times.STORE_REST_S < times.STORE_CALL_S


def test_a_key_is_good_while_the_store_is_tried_again() -> None:
    assert times.KEY_LOOKUP_S < times.KEY_FRESH_S < times.STORE_CALL_S
    assert times.STORE_CALL_S + times.STORE_REST_MOST_S < times.KEY_STALE_S
    assert times.USAGE_LAST_S < times.GATEWAY_LEAVES_S / 2


def test_who_works_on_a_batch_is_heard_several_times_before_another_takes_it_over() -> None:
    assert 3 * times.BATCH_BEAT_S < times.BATCH_LEASE_S
    assert times.BATCH_BEAT_S + times.STORE_CALL_S < times.BATCH_LEASE_S
    assert times.BATCH_LOOK_S <= times.BATCH_BEAT_S
    assert times.BATCH_AGAIN_S < times.BATCH_AGAIN_MOST_S


def test_who_runs_a_response_says_so_several_times_before_another_takes_it_over() -> None:
    assert times.RESPONSE_LEASE_S / 3 + times.STALL_S < times.STORE_CALL_S + times.STALL_S < times.RESPONSE_LEASE_S
    assert times.RESPONSE_SWEEP_S < times.RESPONSE_LEASE_S < times.RESUME_WAIT_S
    assert 20 * times.STORE_CALL_S < times.RESPONSE_LOOSE_S  # a response still being written is kept


def test_who_runs_a_ticket_says_so_several_times_and_outlives_its_client_for_as_long_as_that_looks_for_it() -> None:
    assert times.STORE_CALL_S < times.TICKET_LEASE_S < times.TICKET_GRACE_S < times.TICKET_RESTS_S
    assert times.TICKET_RESTS_S < times.BACKGROUND_TICKET_RESTS_S < times.TICKET_KEPT_S
    assert times.STORE_CALL_S + times.TICKET_LEASE_S / 3 < times.TICKET_LEASE_S
    assert times.RECONNECT_FIRST_S < times.RECONNECT_MOST_S < times.TICKET_GRACE_S
    assert times.RESTART_MOST_S + times.START_S < times.TICKET_GRACE_S


def test_a_watcher_that_was_held_up_says_for_how_long() -> None:
    guard = StallGuard(due_s=0.5, now=10.0)
    assert guard.tick(10.5) == 0.0
    assert guard.tick(10.5 + 0.5 + times.STALL_S) == 0.0
    assert guard.tick(20.0) == 20.0 - 12.0


def test_a_new_request_outwaits_a_restart_and_a_begun_one_waits_longer() -> None:
    restarted_s = times.RESTART_MOST_S + times.START_S
    assert times.CONNECT_WAIT_S < restarted_s < times.SUBMIT_WAIT_S < times.RESUME_WAIT_S
    assert times.RESUME_WAIT_S < times.NO_WORKER_WAIT_S < times.LOSING_S


def test_who_leaves_and_is_replaced_is_outwaited() -> None:
    restarted_s = times.RESTART_MOST_S + times.START_S
    assert times.ENGINE_CORE_DRAINS_S + restarted_s < times.SUBMIT_WAIT_S
    assert times.WORKER_DRAINS_S + times.WORKER_STOPS_S + restarted_s < times.NO_WORKER_WAIT_S
    assert times.GATEWAY_DRAINS_S <= times.TICKET_GRACE_S


def test_time_that_was_slept_through_does_not_count() -> None:
    moments = iter([10.0, 10.5, 11.0, 251.0, 251.5, 252.75])
    clock = LivedClock(0.5, lambda: next(moments))
    assert [clock.now() for _ in range(5)] == [10.5, 11.0, 11.0, 11.5, 12.75]


def test_an_attempt_to_register_outwaits_an_engine_core_that_is_held_up_but_not_stuck() -> None:
    assert times.WORKER_DEAD_S <= times.HELLO_ANSWER_S
    assert times.LOOP_STUCK_S < times.HELLO_ANSWER_MOST_S
    assert times.hello_answer_s(0) == times.HELLO_ANSWER_S
    assert times.hello_answer_s(10**6) == times.HELLO_ANSWER_MOST_S
    assert times.hello_pause_s(1) == times.HELLO_PAUSE_S
    assert times.hello_pause_s(10**6) == times.HELLO_PAUSE_MOST_S


def test_streams_outwait_a_worker_whose_link_has_healed() -> None:
    found_s = times.WORKER_LEASE_S + 2 * times.HELLO_ANSWER_MOST_S  # connecting and answer, each at its longest
    assert found_s < times.RESUME_WAIT_S
    assert found_s + times.HELLO_PAUSE_MOST_S < times.NO_WORKER_WAIT_S
