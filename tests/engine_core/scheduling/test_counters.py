from __future__ import annotations

from dataclasses import fields

from pagoda_engine_core import metrics
from pagoda_engine_core.scheduling.counters import BlockCounts, Totals
from pagoda_proto.engine.v1 import engine_pb2 as pb


def test_whatever_a_scheduler_counts_is_told_to_admins_and_to_prometheus() -> None:
    told = {field.name for field in pb.GetStatsResponse.DESCRIPTOR.fields}
    totals = {field.name for field in fields(Totals)}
    assert {*totals, *BlockCounts._fields} <= told
    by_kind = {"preemptions", "swap_preemptions"}
    assert totals - by_kind <= set(metrics._TOTALS)
