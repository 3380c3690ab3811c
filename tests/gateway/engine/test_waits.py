"""A request refused for lack of an engine core is told when one is due, not a constant."""

from __future__ import annotations

from pagoda_gateway.engine.waits import RETRY_MOST_S, Absence, Waits
from pagoda_proto import times

WAITS = Waits()


def test_nobody_waits_long_for_one_that_was_never_there() -> None:
    absence = Absence(WAITS, 100.0)
    assert absence.submit_wait_s(100.0) == absence.submit_wait_s(500.0) == times.CONNECT_WAIT_S


def test_one_that_was_there_is_waited_for_until_it_has_been_gone_for_long() -> None:
    absence = Absence(WAITS, 0.0)
    absence.end()
    absence.begin(100.0)
    absence.begin(105.0)  # already gone
    assert absence.submit_wait_s(100.0) == times.SUBMIT_WAIT_S
    assert absence.submit_wait_s(110.0) == times.SUBMIT_WAIT_S - 10.0
    assert absence.submit_wait_s(200.0) == times.CONNECT_WAIT_S


def test_retry_after_is_when_a_restart_is_due() -> None:
    absence = Absence(WAITS, 100.0)
    assert absence.retry_after_s(100.0) == WAITS.restart_s
    assert absence.retry_after_s(104.0) == WAITS.restart_s - 4.0
    assert absence.retry_after_s(100.0 + WAITS.restart_s - 0.1) == 1.0  # never zero


def test_retry_after_grows_with_an_absence_that_has_no_end_in_sight() -> None:
    absence = Absence(WAITS, 100.0)
    assert absence.retry_after_s(125.0) == 25.0
    assert absence.retry_after_s(1000.0) == RETRY_MOST_S
    absence.end()
    assert absence.retry_after_s(1001.0) == 1.0
