from __future__ import annotations

from pagoda_engine_core import metrics
from pagoda_engine_core.scheduling.counters import BLOCKS, TOTALS, Totals
from pagoda_proto.engine.v1 import engine_pb2 as pb


def test_whatever_a_scheduler_counts_is_told_to_admins_and_to_prometheus() -> None:
    told = {field.name for field in pb.GetStatsResponse.DESCRIPTOR.fields}
    assert {*TOTALS, *BLOCKS} <= told
    by_kind = {"preemptions", "swap_preemptions"}
    assert set(TOTALS) - by_kind <= set(metrics._TOTALS)


def test_totals_add_up_by_name() -> None:
    total, other = Totals(output_tokens=2), Totals(output_tokens=3, preemptions=1)
    total.add(other)
    assert (total.output_tokens, total.preemptions) == (5, 1)
