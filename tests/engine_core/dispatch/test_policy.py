from __future__ import annotations

from tests.fakes import make_record

from pagoda_engine_core.dispatch.policy import fcfs, priority
from pagoda_engine_core.scheduling.request import Request
from pagoda_proto.params import BACKGROUND_PRIORITY


def make_request(now: float, level: int = 0, n: int = 1) -> Request:
    return Request(make_record(priority=level, n=n), max_output_tokens=8, now=now)


def test_fcfs_orders_by_arrival_whatever_the_priority() -> None:
    early, late = make_request(1.0, level=5), make_request(2.0, level=-5)
    assert fcfs(early) < fcfs(late)


def test_what_nobody_waits_for_comes_after_all_else() -> None:
    background = [make_request(float(i), level=BACKGROUND_PRIORITY + i) for i in range(2)]
    live = make_request(10_000.0)
    assert sorted([*background, live], key=fcfs) == [live, *background]
    assert sorted([*background[::-1], live], key=priority) == [live, *background]


def test_priority_orders_by_priority_then_arrival() -> None:
    urgent, early, late = make_request(9.0, level=-1), make_request(1.0), make_request(2.0)
    assert sorted([late, early, urgent], key=priority) == [urgent, early, late]


def test_no_priority_starves() -> None:
    """A level is worth ten seconds of waiting, so urgent requests overtake a patient one only for so long."""
    patient = make_request(0.0, level=5)
    for waited, first in ((49.0, False), (51.0, True)):
        assert (priority(patient) < priority(make_request(waited))) is first
