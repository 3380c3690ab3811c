"""Usage adds up across restarts of gateways, days, and failures of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import date

import pytest
from tests.gateway.keys.flaky_store import FlakyStore

from pagoda_gateway.keys.charge import Charge
from pagoda_gateway.keys.grants import NO_LIMITS, Limits
from pagoda_gateway.keys.quota import Quota
from pagoda_gateway.keys.usage import KEPT_DAYS, LATE_DAYS, TENANTS, USAGE, Counts, UsageLedger
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Usage

DAY_S = 86400.0
NOON = 40_000 * DAY_S + DAY_S / 2  # a store deletes what expires before today
FIRST, LAST = date(2079, 7, 8), date(2079, 7, 8)
ONE = Usage(prompt_tokens=10, cached_prompt_tokens=4, output_tokens=3)


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def store() -> AsyncIterator[FlakyStore]:
    store = FlakyStore()
    yield store
    await store.aclose()


async def used(ledger: UsageLedger, tenant: str, first: date = FIRST, last: date = LAST) -> list[tuple[str, str, int]]:
    return [(row.day, row.model, row.counts.output_tokens) for row in await ledger.rows([tenant], first, last)]


async def test_lives_of_gateways_add_up_and_writing_again_changes_nothing(store: FlakyStore) -> None:
    clock = Clock()
    one, two = UsageLedger(store, clock), UsageLedger(store, clock)
    for ledger in (one, one, two):
        ledger.count("a", "m", ONE)
        await ledger.flush()
        await ledger.flush()
    two.count("a", "other", ONE)
    two.count("b", "m", ONE)
    await two.flush()
    three = UsageLedger(store, clock)
    rows = await three.rows(await three.tenants(), FIRST, LAST)
    assert [(row.day, row.tenant, row.model, row.counts) for row in rows] == [
        ("2079-07-08", "a", "m", Counts(3, 30, 12, 9)),
        ("2079-07-08", "a", "other", Counts(1, 10, 4, 3)),
        ("2079-07-08", "b", "m", Counts(1, 10, 4, 3)),
    ]


async def test_a_store_that_lost_it_is_told_again_what_this_life_has_counted(store: FlakyStore) -> None:
    one = UsageLedger(store, Clock())
    for tenant in ("a", "b"):
        one.count(tenant, "m", ONE)
    await one.flush()
    for collection, owners in ((TENANTS, ("",)), (USAGE, ("a", "b"))):
        for owner in owners:
            for record in (await store.page(collection, owner, limit=10)).records:
                await store.delete(collection, record.key)
    one.count("a", "m", ONE)
    await one.flush()
    await one.flush()
    other = UsageLedger(store, Clock())
    assert sorted(await other.tenants()) == ["a", "b"]
    assert [await used(other, tenant) for tenant in ("a", "b")] == [[("2079-07-08", "m", 6)], [("2079-07-08", "m", 3)]]


async def test_what_is_not_written_yet_is_told_where_it_was_counted(store: FlakyStore) -> None:
    one = UsageLedger(store, Clock())
    one.count("a", "m", ONE)
    assert await one.tenants() == ["a"]
    assert await used(one, "a") == [("2079-07-08", "m", 3)]


async def test_days_are_apart_and_only_those_asked_for_are_told(store: FlakyStore) -> None:
    clock = Clock()
    one = UsageLedger(store, clock)
    for _ in range(4):
        one.count("a", "m", ONE)
        await one.flush()
        clock.now += DAY_S
    days = ["2079-07-08", "2079-07-09", "2079-07-10", "2079-07-11"]
    assert [day for day, _, _ in await used(one, "a", date(2079, 1, 1), date(2080, 1, 1))] == days
    assert [day for day, _, _ in await used(one, "a", date(2079, 7, 9), date(2079, 7, 10))] == days[1:3]
    assert len(one._totals) == 0


async def test_what_a_store_took_late_is_found(store: FlakyStore) -> None:
    """A gateway that could not write for days writes after others have."""
    clock = Clock()
    late, other = UsageLedger(store, clock), UsageLedger(store, clock)
    late.count("a", "late", ONE)
    for _ in range(LATE_DAYS):
        clock.now += DAY_S
        other.count("a", "m", ONE)
        await other.flush()
    await late.flush()
    assert ("2079-07-08", "late", 3) in await used(other, "a")


async def test_a_store_that_is_gone_costs_nothing_but_time(store: FlakyStore) -> None:
    one = UsageLedger(store, Clock())
    one.count("a", "m", ONE)
    store.gone = True
    for _ in range(3):
        with pytest.raises(PagodaError) as caught:
            await one.flush()
        assert caught.value.code is ErrorCode.UNAVAILABLE
        one.count("a", "m", ONE)
    store.gone = False
    assert await used(one, "a") == [("2079-07-08", "m", 12)]


async def held_up(store: FlakyStore, ledger: UsageLedger) -> asyncio.Task[None]:
    """One count is written; while another is being written, the store does not answer."""
    ledger.count("a", "m", ONE)
    await ledger.flush()
    ledger.count("a", "m", ONE)
    store.answers.clear()
    store.asked.clear()
    writing = asyncio.create_task(ledger.flush())
    await store.asked.wait()
    return writing


async def test_what_is_counted_while_it_is_written_is_written_next(store: FlakyStore) -> None:
    one = UsageLedger(store, Clock())
    writing = await held_up(store, one)
    one.count("a", "m", ONE)
    store.answers.set()
    await writing
    assert await used(UsageLedger(store, Clock()), "a") == [("2079-07-08", "m", 6)]
    assert await used(one, "a") == [("2079-07-08", "m", 9)]


async def test_who_asks_while_an_old_day_is_written_takes_nothing_from_it(store: FlakyStore) -> None:
    clock = Clock()
    one = UsageLedger(store, clock)
    writing = await held_up(store, one)
    clock.now += DAY_S
    asking = asyncio.create_task(one.tenants())
    await asyncio.sleep(0)
    store.gone = True
    store.answers.set()
    assert all(isinstance(each, PagodaError) for each in await asyncio.gather(writing, asking, return_exceptions=True))
    store.gone = False
    assert await used(one, "a") == [("2079-07-08", "m", 6)]


async def test_it_is_written_by_itself_and_at_the_end(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "USAGE_FLUSH_S", 0.01)
    one, look = UsageLedger(store, Clock()), UsageLedger(store, Clock())
    one.start()
    one.count("a", "m", ONE)
    async with asyncio.timeout(60):
        while not await used(look, "a"):  # noqa: ASYNC110 - another life wrote it, and tells nobody
            await asyncio.sleep(0.01)
    monkeypatch.setattr(times, "USAGE_FLUSH_S", 1000.0)
    one.count("a", "m", ONE)
    await one.aclose()
    assert await used(look, "a") == [("2079-07-08", "m", 6)]


async def test_a_silent_store_holds_up_no_end(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "USAGE_LAST_S", 0.01)
    one = UsageLedger(store, Clock())
    one.count("a", "m", ONE)
    store.answers.clear()
    async with asyncio.timeout(60):
        await one.aclose()


async def test_records_vanish_in_the_end(store: FlakyStore) -> None:
    clock = Clock()
    one = UsageLedger(store, clock)
    one.count("a", "m", ONE)
    await one.flush()
    (record,) = (await store.page(USAGE, "a", limit=9)).records
    assert record.expires_at == NOON + KEPT_DAYS * DAY_S


async def test_a_run_is_counted_once_when_it_was_taken_and_not_at_all_when_it_was_not(store: FlakyStore) -> None:
    ledger, clock = UsageLedger(store, Clock()), Clock()
    limits = Limits(tokens_per_minute=100).or_else(NO_LIMITS)
    quota = Quota(limits, clock)
    taken, refused = (Charge(quota, ledger, "a", "m") for _ in range(2))
    taken.begin(lambda: ONE)  # prompt and output
    refused.begin(lambda: Usage(prompt_tokens=20))
    assert [left.remaining for left in quota.left()] == [100 - 13 - 20]
    taken.taken()
    taken.end(ONE)
    refused.end(Usage(prompt_tokens=20))
    assert [left.remaining for left in quota.left()] == [100 - 13]
    (row,) = await ledger.rows(["a"], FIRST, LAST)
    assert row.counts == Counts(1, 10, 4, 3)
