from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_engine_core.grammars.turns import Turns
from pagoda_engine_core.grammars.verdicts import Verdict
from pagoda_proto.errors import ErrorCode, PagodaError


def told(grammar: str, verdict: Verdict) -> None:
    """The callback of a waiting request."""


def put(turns: Turns, tenant: str, *grammars: str) -> list[str | None]:
    gone = [turns.put(tenant, grammar, told) for grammar in grammars]
    return [one[1] if one else None for one in gone]


def take(turns: Turns, count: int) -> list[str]:
    taken = [turns.take() for _ in range(count)]
    return [one[0] for one in taken if one]


def test_tenants_take_turns_and_each_has_its_own_in_order() -> None:
    turns = Turns(10)
    put(turns, "a", "a1", "a2", "a3", "a4")
    put(turns, "b", "b1", "b2")
    assert take(turns, 1) == ["a1"]
    put(turns, "c", "c1")
    assert take(turns, 6) == ["b1", "a2", "c1", "b2", "a3", "a4"]


def test_who_has_most_waiting_makes_room_with_what_came_last() -> None:
    turns = Turns(5)
    assert put(turns, "a", "a1", "a2", "a3", "a4", "a5") == [None] * 5
    with pytest.raises(PagodaError, match="5 grammars are already waiting") as refused:
        put(turns, "a", "a6")
    assert refused.value.code is ErrorCode.OVERLOADED
    assert put(turns, "b", "b1", "b2") == ["a5", "a4"]
    with pytest.raises(PagodaError):
        put(turns, "b", "b3")
    assert put(turns, "c", "c1") == ["a3"]
    assert put(turns, "a", "a1") == [None], "it waits already"
    assert take(turns, 5) == ["a1", "b1", "c1", "a2", "b2"]


def test_one_grammar_of_several_tenants_waits_for_the_first_turn_of_theirs() -> None:
    turns = Turns(4)
    put(turns, "a", "a1", "a2", "both")
    put(turns, "b", "both")
    assert take(turns, 3) == ["a1", "both", "a2"]
    put(turns, "a", "a1", "a2", "both")
    put(turns, "b", "both")
    assert put(turns, "c", "c1") == [None], "it waits in the other line"
    assert put(turns, "c", "both") == [None], "there is no room, and it waits elsewhere"
    assert take(turns, 4) == ["a1", "both", "c1", "a2"]


def test_who_waits_for_a_turn_is_woken_by_it_and_by_the_end() -> None:
    turns = Turns(4)
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.extend([turns.take(), turns.take()]))
    thread.start()
    turns.put("a", "a1", told)
    while len(turns._lines):
        threading.Event().wait(0.001)
    turns.close()
    thread.join()
    assert taken == [("a1", told), None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)) | st.none(), max_size=80))
def test_whatever_comes_no_more_wait_than_may_and_all_are_checked_or_told(
    events: list[tuple[str, int] | None],
) -> None:
    turns, waiting, tenants = Turns(6), set[str](), Counter[str]()
    for event in events:
        if event is None and waiting:
            waiting.remove(take(turns, 1)[0])
        elif event is not None:
            tenant, number = event
            try:
                gone = turns.put(tenant, f"{number}", told)
            except PagodaError:
                assert f"{number}" not in waiting
                continue
            waiting = (waiting | {f"{number}"}) - ({gone[1]} if gone else set())
        tenants = Counter({tenant: len(line) for tenant, line in turns._lines.items()})
        assert tenants.total() <= 6
        assert {grammar for line in turns._lines.values() for grammar in line} == waiting
    assert set(take(turns, len(waiting))) == waiting
