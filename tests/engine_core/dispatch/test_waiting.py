"""The queue's order equals comparing all heads afresh for each request, at the cost of one look at each head."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import make_record

from pagoda_engine_core.dispatch.fairness import Fairness
from pagoda_engine_core.dispatch.policy import fcfs
from pagoda_engine_core.dispatch.waiting import Rank, WaitingQueue
from pagoda_engine_core.scheduling.request import Request

ASKED = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(Rank)), st.integers(1, 30)), max_size=30)


class Counting(Fairness):
    """Counts the calls of `served`."""

    def __init__(self) -> None:
        super().__init__(counting=True)
        self.asked_for = 0

    def served(self, tenant: str) -> float:
        self.asked_for += 1
        return super().served(tenant)


def request_of(number: int, tenant: int, tokens: int) -> Request:
    record = make_record([1] * tokens, request_id=f"{number}", tenant=f"tenant-{tenant}")
    return Request(record, max_output_tokens=1, now=0.0)


def filled(asked: list[tuple[int, Rank, int]]) -> tuple[WaitingQueue, Counting]:
    fairness = Counting()
    queue = WaitingQueue(fcfs, fairness)
    for number, (tenant, rank, tokens) in enumerate(asked):
        queue.add(request_of(number, tenant, tokens), rank, 0.0)
    return queue, fairness


def compared_anew(queue: WaitingQueue) -> Iterator[str]:
    """The reference order: each time, the least of all remaining heads."""
    seen: set[str] = set()
    while left := {name: [one for one in line if one.request.request_id not in seen] for name, line in lines(queue)}:
        heads = {tenant: line[0] for tenant, line in left.items() if line}
        if not heads:
            return
        head = heads[min(heads, key=lambda tenant: queue._turn(tenant, heads[tenant]))]
        seen.add(head.request.request_id)
        yield head.request.request_id


def lines(queue: WaitingQueue) -> list[tuple[str, list]]:  # type: ignore[type-arg]
    return list(queue._lines.items())


@given(ASKED, st.sets(st.integers(0, 29)))
def test_the_order_is_that_of_heads_compared_anew_while_some_are_taken_and_served(
    asked: list[tuple[int, Rank, int]], taken: set[int]
) -> None:
    """A request that is taken no longer counts as waiting, and its tenant is charged."""
    orders = []
    for walk in (lambda queue: (one.request.request_id for one in queue), compared_anew):
        queue, fairness = filled(asked)
        order = []
        for name in walk(queue):
            order.append(name)
            if int(name) in taken:
                request = queue.get(name)
                assert request is not None
                queue.remove(name)
                fairness.charge([request])
        orders.append(order)
    assert orders[0] == orders[1]
    assert sorted(orders[0], key=int) == [str(number) for number in range(len(asked))]


@pytest.mark.parametrize("tenants", [1, 50])
def test_a_walk_looks_at_each_once_and_entries_at_no_turn(tenants: int) -> None:
    queue, fairness = filled([(number % tenants, Rank.NEW, 1) for number in range(200)])
    fairness.asked_for = 0
    assert len(list(queue)) == 200
    assert fairness.asked_for == 200
    assert [one.request.request_id for one in queue.entries()] == [str(number) for number in range(200)]
    assert fairness.asked_for == 200


@given(ASKED, st.sets(st.integers(0, 29)))
def test_begun_entries_are_those_that_are_not_new(asked: list[tuple[int, Rank, int]], taken: set[int]) -> None:
    queue, _ = filled(asked)
    for number in taken & set(range(len(asked))):
        queue.remove(str(number))
    assert queue.begun_entries() == [one for one in queue.entries() if one.place.rank is not Rank.NEW]
    queue.take_all()
    assert queue.begun_entries() == []
