"""A refusal is repeated to its kind for a moment, and to nobody else."""

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
    assert bench.refusals.repeated(ONE) is FULL
    assert bench.refusals.repeated(OTHER) is None
    assert bench.counted == [ErrorCode.OVERLOADED]
    bench.now += REPEATED_S - 0.001
    assert bench.refusals.repeated(ONE) is FULL
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
    assert (bench.refusals.repeated(ONE), bench.refusals.repeated(OTHER)) == (later, FULL)


def test_sec_17_kinds_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KINDS", 3)
    bench = Bench()
    for number in range(10):
        bench.refusals.came(Kind(str(number), 0, 0.0), FULL)
    assert [bench.refusals.repeated(Kind(str(number), 0, 0.0)) for number in range(6, 10)] == [None, FULL, FULL, FULL]


def test_a_kind_is_what_the_policy_looks_at() -> None:
    assert Kind.under("fcfs", "a", 0, 0.0) == Kind.under("fcfs", "b", 0, 0.0)
    assert Kind.under("fair", "a", 0, 0.0) != Kind.under("fair", "b", 0, 0.0)
    assert Kind.under("fair", "a", 3, 0.0) == Kind.under("fair", "a", 0, 0.0)
    assert Kind.under("priority", "a", 3, 0.0) != Kind.under("priority", "a", 0, 0.0)
    assert Kind.under("fcfs", "a", BACKGROUND_PRIORITY, 0.0) != Kind.under("fcfs", "a", 0, 0.0)
    assert Kind.under("fcfs", "a", 0, 1.0) != Kind.under("fcfs", "a", 0, 0.0)
