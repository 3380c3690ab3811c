"""A failing store is given a rest, and then tried again."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import ManualClock

from pagoda_gateway.store.guard import Circuit, GuardedStore
from pagoda_gateway.store.interface import Conflict, Full, unavailable
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError


class Failing(SqliteStore):
    """Fails, or never answers, as told."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.error: Exception | None = None
        self.hangs = False
        self.asked = 0
        self.called = asyncio.Event()

    async def length(self, log: str) -> int:
        self.asked += 1
        self.called.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return 7


def test_a_circuit_opens_for_longer_every_time_and_lets_one_call_try() -> None:
    circuit = Circuit(1.0, 3.0)
    assert circuit.wait_s(0.0) == 0.0
    circuit.ended(0.0, well=False)
    for failed_at, rest_s in ((0.0, 1.0), (1.0, 2.0), (3.0, 3.0), (6.0, 3.0)):
        assert circuit.failing
        assert circuit.wait_s(failed_at + rest_s / 2) == rest_s / 2
        assert circuit.wait_s(failed_at + rest_s) == 0.0
        assert circuit.wait_s(failed_at + rest_s) > 0.0  # another caller is trying
        circuit.ended(failed_at + rest_s, well=False)
    assert circuit.wait_s(9.0 + 3.0) == 0.0
    circuit.ended(12.0, well=True)
    assert not circuit.failing
    assert circuit.wait_s(12.0) == 0.0
    circuit.ended(12.0, well=False)
    assert circuit.wait_s(12.0) == 1.0


def test_a_trial_whose_caller_left_leaves_room_for_the_next() -> None:
    circuit = Circuit(1.0, 3.0)
    circuit.ended(0.0, well=False)
    assert circuit.wait_s(1.0) == 0.0
    circuit.ended(1.0, well=None)
    assert circuit.failing
    assert circuit.wait_s(1.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from([True, False, None])), max_size=30))
@settings(max_examples=50)
def test_a_circuit_is_never_closed_for_good(steps: list[tuple[float, bool | None]]) -> None:
    circuit = Circuit(1.0, 4.0)
    now = 0.0
    for passed, well in steps:
        now += passed
        if not circuit.wait_s(now):
            circuit.ended(now, well=well)
    assert circuit.wait_s(now + 4.0) == 0.0


async def test_failures_are_told_and_then_spared(caplog: pytest.LogCaptureFixture) -> None:
    store, clock, outcomes = Failing(), ManualClock(), list[str]()
    guarded = GuardedStore(store, outcomes.append, clock=clock)
    assert await guarded.length("log") == 7
    store.error = unavailable("it is broken", 1.0)
    for _ in range(3):
        with pytest.raises(PagodaError) as caught:
            await guarded.length("log")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert 0 < caught.value.retry_after_s <= times.STORE_REST_S
    assert guarded.failing
    assert store.asked == 2
    store.error = None
    clock.advance(times.STORE_REST_S)
    assert await guarded.length("log") == 7
    assert not guarded.failing
    assert outcomes == ["answered", "failed", "refused", "refused", "answered"]
    assert caplog.messages == ["the store cannot be used: it is broken", "the store is back"]


@pytest.mark.parametrize(
    ("error", "outcome"), [(Conflict(), "answered"), (ValueError("too long"), "answered"), (Full("no room"), "full")]
)
async def test_a_no_is_an_answer(error: Exception, outcome: str) -> None:
    store, outcomes = Failing(), list[str]()
    guarded = GuardedStore(store, outcomes.append)
    store.error = error
    for _ in range(2):
        with pytest.raises(type(error)):
            await guarded.length("log")
    assert outcomes == [outcome, outcome]
    assert not guarded.failing


async def test_who_does_not_answer_is_not_waited_for() -> None:
    store, outcomes = Failing(), list[str]()
    guarded = GuardedStore(store, outcomes.append, budget_s=0.01)
    store.hangs = True
    with pytest.raises(PagodaError):
        await guarded.length("log")
    with pytest.raises(PagodaError):
        await guarded.length("log")
    assert outcomes == ["late", "refused"]
    assert store.asked == 1


async def test_a_caller_who_leaves_says_nothing_about_the_store() -> None:
    store, outcomes = Failing(), list[str]()
    guarded = GuardedStore(store, outcomes.append)
    store.hangs = True
    call = asyncio.create_task(guarded.length("log"))
    await store.called.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    store.hangs = False
    assert await guarded.length("log") == 7
    assert outcomes == ["answered"]
