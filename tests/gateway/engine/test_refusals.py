"""For a moment, a refusal is repeated to requests of the same kind, and to no others."""

from __future__ import annotations

import pytest

from pagoda_gateway.engine import refusals as module
from pagoda_gateway.engine.refusals import REPEATED_S, Kind, Refusals
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import BACKGROUND_PRIORITY

FULL = PagodaError(ErrorCode.OVERLOADED, "full", retry_after_s=2.0)
ONE, OTHER = Kind("", 0, 0.0), Kind("", 0, 30.0)


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.counted: list[ErrorCode] = []
        self.refusals = Refusals(self.counted.append, lambda: self.now)


def test_it_is_repeated_to_its_kind_for_a_moment_and_counted_like_any() -> None:
    bench = Bench()
    assert bench.refusals.repeated(ONE) is None
    bench.refusals.came(ONE, FULL)
    assert told(bench.refusals.repeated(ONE)) == told(FULL)
    assert bench.refusals.repeated(OTHER) is None
    assert bench.counted == [ErrorCode.OVERLOADED]
    bench.now += REPEATED_S - 0.001
    assert told(bench.refusals.repeated(ONE)) == told(FULL)
    bench.now += 0.001
    assert bench.refusals.repeated(ONE) is None, "repeating it does not prolong it"
    assert not bench.refusals._last


def test_the_last_one_counts_and_no_other_of_its_kind_is_kept() -> None:
    bench, later = Bench(), PagodaError(ErrorCode.OVERLOADED, "fuller")
    bench.refusals.came(ONE, FULL)
    bench.now += REPEATED_S / 2
    bench.refusals.came(OTHER, FULL)
    bench.refusals.came(ONE, later)
    bench.now += REPEATED_S * 0.75
    assert told(bench.refusals.repeated(ONE)) == told(later)
    assert told(bench.refusals.repeated(OTHER)) == told(FULL)


def told(error: PagodaError | None) -> object:
    return error and (error.code, error.message, error.param, error.retry_after_s)


def test_sec_17_nothing_is_kept_of_who_was_refused() -> None:
    bench = Bench()
    try:
        raise PagodaError(ErrorCode.OVERLOADED, "full")
    except PagodaError as error:
        raised = error
        bench.refusals.came(ONE, error)
    repeated = bench.refusals.repeated(ONE)
    assert repeated is not None
    assert repeated.__traceback__ is None, "its frames hold the request"
    raised.code = ErrorCode.STREAM_INTERRUPTED
    assert repeated.code is ErrorCode.OVERLOADED, "what it becomes to that one is its own"
    bench.now += 2 * REPEATED_S
    bench.refusals.came(OTHER, FULL)
    assert list(bench.refusals._last) == [OTHER], "nor for longer, though nobody asks"


def test_sec_17_kinds_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KINDS", 3)
    bench = Bench()
    for number in range(10):
        bench.refusals.came(Kind(str(number), 0, 0.0), FULL)
    known = [told(bench.refusals.repeated(Kind(str(number), 0, 0.0))) for number in range(6, 10)]
    assert known == [None, *[told(FULL)] * 3]


def test_a_kind_is_what_the_policy_looks_at() -> None:
    assert Kind.under("fcfs", "a", 0, 0.0) == Kind.under("fcfs", "b", 0, 0.0)
    assert Kind.under("fair", "a", 0, 0.0) != Kind.under("fair", "b", 0, 0.0)
    assert Kind.under("fair", "a", 3, 0.0) == Kind.under("fair", "a", 0, 0.0)
    assert Kind.under("priority", "a", 3, 0.0) != Kind.under("priority", "a", 0, 0.0)
    assert Kind.under("fcfs", "a", BACKGROUND_PRIORITY, 0.0) != Kind.under("fcfs", "a", 0, 0.0)
    assert Kind.under("fcfs", "a", 0, 1.0) != Kind.under("fcfs", "a", 0, 0.0)
