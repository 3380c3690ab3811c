"""How much memory requests hold in the gateway."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.http.memory import COUNTED_ABOVE_BYTES, MemoryBudget
from pagoda_proto.errors import ErrorCode, PagodaError

UNIT = COUNTED_ABOVE_BYTES


def test_one_client_has_half() -> None:
    budget = MemoryBudget(8 * UNIT)
    holding = budget.holding("a")
    holding.grow_to(4 * UNIT)
    with pytest.raises(PagodaError) as caught:
        budget.holding("a").grow_to(2 * UNIT)
    assert (caught.value.code, caught.value.status.http) == (ErrorCode.OVERLOADED, 503)
    budget.holding("b").grow_to(4 * UNIT)
    with pytest.raises(PagodaError):
        budget.holding("c").grow_to(2 * UNIT)
    budget.holding("c").grow_to(UNIT)  # small amounts are not counted
    holding.release()
    budget.holding("c").grow_to(2 * UNIT)


def test_who_never_finds_room_is_not_told_to_try_again() -> None:
    holding = MemoryBudget(8 * UNIT).holding("a")
    with pytest.raises(PagodaError) as caught:
        holding.grow_to(4 * UNIT + 1)
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE
    assert not caught.value.status.retryable
    holding.grow_to(4 * UNIT)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6 * UNIT), st.booleans()), max_size=30))
def test_the_books_balance(steps: list[tuple[str, int, bool]]) -> None:
    budget = MemoryBudget(8 * UNIT)
    holdings = {client: budget.holding(client) for client in "abc"}
    for client, num_bytes, release in steps:
        try:
            holdings[client].grow_to(num_bytes)
        except PagodaError:
            assert num_bytes > UNIT
        assert 0 <= budget.held_bytes <= 8 * UNIT
        if release:
            holdings[client].release()
    for holding in holdings.values():
        holding.release()
        holding.release()
    assert budget.held_bytes == 0
    assert not budget._by_client
