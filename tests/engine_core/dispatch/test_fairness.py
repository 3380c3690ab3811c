"""Waiting tenants are served fairly, whatever each of them sends; a tenant that waits alone is not delayed by it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_core.dispatch.test_router import Bench
from tests.fakes import make_record

from pagoda_engine_core.dispatch.fairness import MAX_COUNTERS, OUTPUT_COST, SPARED_FOR_S, Fairness
from pagoda_engine_core.dispatch.policy import fcfs
from pagoda_engine_core.dispatch.router import LEAST_ROWS_TO_SPARE
from pagoda_engine_core.dispatch.waiting import Rank, WaitingQueue
from pagoda_engine_core.scheduling.request import Request
from pagoda_proto.params import BACKGROUND_PRIORITY

MAX_ROWS, MAX_TOKENS_PER_STEP = 4, 64


def bench(policy: str = "fair") -> Bench:
    found = Bench(policy=policy, max_rows=MAX_ROWS, max_tokens_per_step=MAX_TOKENS_PER_STEP)
    found.join(max_rows=MAX_ROWS, num_blocks=512)
    return found


def endings(found: Bench) -> list[str]:
    return [delta.request_id for delta in found.deltas if delta.ends_request]


@pytest.mark.parametrize(("policy", "ahead"), [("fair", MAX_ROWS), ("fcfs", 100)])
def test_a_flood_is_no_further_in_front_of_others_than_what_runs(policy: str, ahead: int) -> None:
    found = bench(policy)
    for i in range(100):
        found.add(make_record((i, 1, 2), request_id=f"flood-{i}", tenant="flood"))
    found.dispatch()
    found.add(make_record((5, 5), request_id="small", tenant="small"))
    found.run()
    assert endings(found).index("small") == ahead


def flooded(policy: str = "fair", max_rows: int = LEAST_ROWS_TO_SPARE, later_s: float = 0.0) -> Bench:
    """One tenant has asked, and another one floods the router `later_s` seconds later."""
    found = Bench(policy=policy, max_rows=max_rows, max_tokens_per_step=MAX_TOKENS_PER_STEP)
    found.join(max_rows=max_rows, num_blocks=512)
    found.add(make_record((9, 9), request_id="small-0", tenant="small"))
    found.run()
    found.now += later_s
    for i in range(100):
        found.add(make_record((i, 1, 2), request_id=f"flood-{i}", tenant="flood"))
    found.dispatch()
    return found


def test_where_several_ask_the_last_row_is_for_who_has_none() -> None:
    found = flooded()
    assert len(found.held(1)) == LEAST_ROWS_TO_SPARE - 1
    small = found.add(make_record((5, 5), request_id="small-1", tenant="small"))
    found.dispatch()
    assert not found.router.is_waiting(small.request_id), "it begins in the next step"
    found.add(make_record((5, 6), request_id="small-2", tenant="small"))
    found.dispatch()
    assert found.router.is_waiting("small-2"), "it takes turns"
    found.run()
    assert len(endings(found)) == 103


@pytest.mark.parametrize(
    ("policy", "max_rows", "later_s"), [("fcfs", 16, 0.0), ("fair", 15, 0.0), ("fair", 16, SPARED_FOR_S + 1)]
)
def test_else_no_row_is_spared(policy: str, max_rows: int, later_s: float) -> None:
    """Without fair scheduling, with too few rows, or for a tenant that has not asked for long."""
    found = flooded(policy, max_rows, later_s)
    assert len(found.held(1)) == max_rows


def test_what_was_lost_may_take_the_last_row() -> None:
    found = flooded(later_s=SPARED_FOR_S + 1)
    assert found.step(1)
    found.lose(1)
    found.add(make_record((9, 8), request_id="small-1", tenant="small"))
    found.join(max_rows=LEAST_ROWS_TO_SPARE, num_blocks=512)
    found.dispatch()
    assert found.held(2) == {f"flood-{i}" for i in range(LEAST_ROWS_TO_SPARE)}


def test_within_a_tenant_it_is_first_come_first_served() -> None:
    found = bench()
    order = {tenant: [f"{tenant}-{i}" for i in range(12)] for tenant in "ab"}
    for i in range(12):
        for tenant in "ab":
            found.add(make_record((i,) * (1 + i), request_id=f"{tenant}-{i}", tenant=tenant, max_tokens=4))
    found.run()
    for tenant, names in order.items():
        assert [name for name in endings(found) if name in names] == names, tenant


def test_nobody_saves_up_turns() -> None:
    found = bench()
    for i in range(40):
        found.add(make_record((i, 1), request_id=f"busy-{i}", tenant="busy"))
    found.run(until=lambda: len(endings(found)) >= 30)
    for i in range(20):
        found.add(make_record((i, 2), request_id=f"late-{i}", tenant="late"))
    found.run()
    among = endings(found)[30:46]
    assert abs(2 * sum(name.startswith("busy") for name in among) - len(among)) <= 2 * MAX_ROWS


def test_a_free_machine_costs_nobody_a_turn() -> None:
    """A tenant that was served while no other one waited is not set back for it."""
    found = bench()
    for i in range(20):
        found.add(make_record((i, 1), request_id=f"early-{i}", tenant="early"))
        found.run()
    for i in range(10):
        for tenant in ("new", "early"):
            found.add(make_record((i, 3), request_id=f"{tenant}-again-{i}", tenant=tenant))
    found.run()
    first = endings(found)[20:30]
    assert abs(2 * sum(name.startswith("early") for name in first) - len(first)) <= 2 * MAX_ROWS


def test_background_work_waits_for_everybody() -> None:
    found = bench()
    for i in range(10):
        found.add(make_record((i, 1), request_id=f"batch-{i}", tenant="batch", priority=BACKGROUND_PRIORITY))
        found.add(make_record((i, 2), request_id=f"live-{i}", tenant="live"))
    found.run()
    assert all(name.startswith("live") for name in endings(found)[:10])


WORK = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=30, max_size=30)  # prompt, output
WEIGHTS = st.lists(st.sampled_from([1, 2, 5]), min_size=2, max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.data(), WEIGHTS)
def test_service_of_those_who_wait_differs_by_what_is_under_way_at_most(
    data: st.DataObject, weights: list[int]
) -> None:
    """The paper's bound in our costs: twice what all rows can hold, each a request as dear as the dearest."""
    found = bench()
    left: Counter[str] = Counter()
    requests: dict[str, list[Request]] = {}
    dearest = 0.0
    for number, weight in enumerate(weights):
        tenant = f"t{number}"
        for prompt, output in data.draw(WORK):
            record = make_record((7,) * prompt, tenant=tenant, weight=weight, max_tokens=output)
            requests.setdefault(tenant, []).append(found.add(record))
            dearest = max(dearest, prompt + OUTPUT_COST * output)
            left[tenant] += 1

    def served(tenant: str) -> float:
        began = (request for request in requests[tenant] if request.started)
        costs = (request.num_prompt_tokens + OUTPUT_COST * request.num_output_tokens for request in began)
        return sum(costs) / weights[int(tenant[1:])]

    def waiting(tenant: str) -> bool:
        return any(found.router.is_waiting(request.request_id) for request in requests[tenant])

    while all(map(waiting, requests)):
        found.dispatch()
        assert found.step(1)
        both = [served(tenant) for tenant in requests]
        assert max(both) - min(both) <= 2 * MAX_ROWS * dearest
    found.run()
    assert len(endings(found)) == sum(left.values())


def test_the_order_of_a_queue_is_the_same_whoever_looks() -> None:
    """Reading a queue charges no tenant."""
    fairness = Fairness(counting=True)
    queue = WaitingQueue(fcfs, fairness)
    for i in range(9):
        request = Request(make_record(tenant="abc"[i % 3], request_id=str(i)), max_output_tokens=1, now=float(i))
        queue.add(request, Rank.NEW, 0.0)
    names = [queued.request.request_id for queued in queue]
    assert names == [queued.request.request_id for queued in queue]
    assert sorted(names) == [str(i) for i in range(9)]
    assert [request.request_id for request in queue.take_all()] == names


def test_sec_17_tenants_who_wait_for_nothing_are_forgotten() -> None:
    fairness = Fairness(counting=True)
    for i in range(3 * MAX_COUNTERS):
        tenant = f"t{i}"
        fairness.comes(tenant, {"waits"})
        fairness.charge([Request(make_record((1,) * (1 + i % 50), tenant=tenant), max_output_tokens=1, now=0.0)])
    assert len(fairness._served) <= MAX_COUNTERS
