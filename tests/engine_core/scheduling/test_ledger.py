from __future__ import annotations

from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_engine_core import metrics
from pagoda_engine_core.scheduling.kv_cache import BlockCounts
from pagoda_engine_core.scheduling.ledger import QUEUED, Cause, Ledger, Totals
from pagoda_proto.engine.v1 import engine_pb2 as pb

CHANGES = st.lists(st.tuples(st.sampled_from(list(Cause)), st.integers(0, 10**6)))


def test_time_goes_to_the_cause_in_force() -> None:
    ledger = Ledger(Cause.QUEUED_BEHIND, 10)
    ledger.enter(Cause.PREFILL, 12)
    ledger.enter(Cause.DECODE, 13)
    ledger.enter(Cause.PREEMPTED, 20)
    ledger.enter(Cause.DECODE, 24)
    ledger.close(25)
    assert [(entry.cause, entry.seconds) for entry in ledger.entries()] == [
        ("queued_behind", 2), ("prefill", 1), ("decode", 8), ("preempted", 4),
    ]  # fmt: skip
    assert sum(entry.seconds for entry in ledger.entries()) == 15


def test_causes_without_time_are_left_out() -> None:
    ledger = Ledger(Cause.QUEUED_NO_WORKER, 1)
    ledger.enter(Cause.QUEUED_BEHIND, 1)
    ledger.close(1)
    assert ledger.entries() == []
    assert sum(entry.seconds for entry in ledger.entries()) == 0


def test_nothing_is_written_after_closing() -> None:
    ledger = Ledger(Cause.DECODE, 0)
    ledger.close(1)
    with pytest.raises(ValueError, match="closed"):
        ledger.enter(Cause.DECODE, 2)
    with pytest.raises(ValueError, match="closed"):
        ledger.close(2)
    assert sum(entry.seconds for entry in ledger.entries()) == 1


@given(start=st.integers(0, 10**6), changes=CHANGES)
def test_entries_sum_exactly_to_the_latency(start: int, changes: list[tuple[Cause, int]]) -> None:
    now = Fraction(start, 3)
    ledger = Ledger(Cause.QUEUED_NO_WORKER, now)
    for cause, elapsed in changes:
        now += Fraction(elapsed, 7)
        ledger.enter(cause, now)
        assert ledger.cause is cause
    now += Fraction(1, 11)
    ledger.close(now)
    assert sum(entry.seconds for entry in ledger.entries()) == now - Fraction(start, 3)
    assert len({entry.cause for entry in ledger.entries()}) == len(ledger.entries())


def test_the_queued_causes_are_those_named_so() -> None:
    assert {cause.value for cause in Cause} - {cause.value for cause in QUEUED} == {
        "prefill", "decode", "preempted", "replaying",
    }  # fmt: skip


def test_whatever_a_scheduler_counts_is_told_to_admins_and_to_prometheus() -> None:
    told = {field.name for field in pb.GetStatsResponse.DESCRIPTOR.fields}
    totals = {field.name for field in fields(Totals)}
    assert {*totals, *BlockCounts._fields} <= told
    by_kind = {"preemptions", "swap_preemptions"}
    assert totals - by_kind <= set(metrics._TOTALS)
