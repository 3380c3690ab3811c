from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda_proto.times import BUDGET_RESTORE_S
from pagoda_worker.process.step_budget import MIN_TOKENS, StepBudget


def test_half_after_a_lack_of_memory_and_twice_as_much_after_every_while_without() -> None:
    budget = StepBudget(2048)
    assert budget.offered(0.0) == 2048
    budget.ran_out(10.0)
    budget.ran_out(11.0)
    assert budget.offered(11.0) == 512
    assert budget.offered(11.0 + BUDGET_RESTORE_S) == 1024
    budget.ran_out(11.0 + BUDGET_RESTORE_S)
    assert budget.offered(12.0 + BUDGET_RESTORE_S) == 512
    assert budget.offered(11.0 + 3 * BUDGET_RESTORE_S) == 2048


times = st.floats(0, 1e9)


@given(st.integers(1, 10**6), st.lists(st.tuples(times, st.booleans())))
def test_never_more_than_configured_nor_less_than_the_floor(most: int, moments: list[tuple[float, bool]]) -> None:
    budget = StepBudget(most)
    for now, fails in sorted(moments):
        if fails:
            budget.ran_out(now)
        assert min(MIN_TOKENS, most) <= budget.offered(now) <= most
