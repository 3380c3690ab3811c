"""Gateways find batches that nobody works on, and only one of them works on a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.fakes import ManualClock
from tests.gateway.batches.fakes import OWNER, FakeService, desk_on, ids, line, submitted
from tests.gateway.store.redis_server import running_redis

from pagoda_gateway.batches import runner as module
from pagoda_gateway.batches.batch import Batch, Counts, Status
from pagoda_gateway.batches.batches import OPEN, Work
from pagoda_gateway.batches.runner import BatchRunner, in_turn
from pagoda_gateway.batches.work import Desk
from pagoda_gateway.store.interface import unavailable
from pagoda_gateway.store.redis_store import RedisStore
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore

NAMES = [f"id{i:02d}" for i in range(6)]
CONTENT = b"".join(map(line, NAMES))
Start = Callable[..., BatchRunner]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000.0)


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(MEMORY, clock)
    yield store
    await store.aclose()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.times, "BATCH_LOOK_S", 0.01)
    monkeypatch.setattr(module.times, "BATCH_BEAT_S", 0.01)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    runners = []

    def started(desk: Desk) -> BatchRunner:
        runner = BatchRunner(desk)
        runner.start()
        runners.append(runner)
        return runner

    yield started
    for runner in runners:
        await runner.aclose()


async def until(question: Callable[[], Awaitable[bool]]) -> None:
    while not await question():  # noqa: ASYNC110 - others' work is seen in the store
        await asyncio.sleep(0.005)


async def ended(desk: Desk, batch: Batch, owner: str = OWNER) -> Batch:
    async def over() -> bool:
        return (await desk.batches.find(owner, batch.id)).has_ended()

    await until(over)
    return await desk.batches.find(owner, batch.id)


async def test_a_batch_is_found_and_answered(store: SqliteStore, clock: ManualClock, start: Start) -> None:
    desk = desk_on(store, FakeService(), clock)
    batch = await submitted(desk, CONTENT)
    start(desk)
    assert (await ended(desk, batch)).counts == Counts(6, 6, 0)
    later = await submitted(desk, CONTENT)
    assert (await ended(desk, later)).status is Status.COMPLETED
    assert await ids(desk, later.output_id) == NAMES


async def test_only_one_of_several_works_on_a_batch(store: SqliteStore, clock: ManualClock, start: Start) -> None:
    services = [FakeService(), FakeService(), FakeService()]
    desks = [desk_on(store, service, clock) for service in services]
    for desk in desks:
        start(desk)
    batches = [await submitted(desks[0], CONTENT) for _ in range(4)]
    for batch in batches:
        assert (await ended(desks[0], batch)).counts == Counts(6, 6, 0)
    assert sum(service.asked.total() for service in services) == 24


@pytest.mark.e2e
async def test_gateways_that_share_a_redis_share_the_work(start: Start) -> None:
    services = [FakeService(), FakeService()]
    async with running_redis() as server:
        stores = [RedisStore(server.address) for _ in services]
        desks = [desk_on(store, service, time.time) for store, service in zip(stores, services, strict=True)]
        batches = [await submitted(desk, CONTENT) for desk in desks for _ in range(3)]
        runners = [start(desk) for desk in desks]
        for batch in batches:
            assert (await ended(desks[0], batch)).counts == Counts(6, 6, 0)
            assert await ids(desks[1], batch.output_id) == NAMES
        for runner in runners:
            await runner.aclose()
        for store in stores:
            await store.aclose()
    assert sum(service.asked.total() for service in services) == 36


async def test_a_batch_whose_gateway_died_is_gone_on_with(store: SqliteStore, clock: ManualClock, start: Start) -> None:
    first, second = FakeService(), FakeService()
    never = asyncio.Event()
    first.script = lambda prompt: never
    desk = desk_on(store, first, clock)
    dying = BatchRunner(desk)
    dying._release = None  # type: ignore[assignment, method-assign]  # a killed process releases nothing
    batch = await submitted(desk, CONTENT)
    dying.start()
    await first.begun.wait()
    await dying.aclose()
    other = desk_on(store, second, clock)
    start(other)
    await asyncio.sleep(0.05)
    assert not second.asked  # the claim has not expired
    clock.advance(module.times.BATCH_LEASE_S + 1)
    assert (await ended(other, batch)).counts == Counts(6, 6, 0)
    assert second.asked.total() == 6


async def test_who_leaves_lets_others_go_on_at_once(store: SqliteStore, clock: ManualClock, start: Start) -> None:
    first, second = FakeService(), FakeService()
    never = asyncio.Event()
    first.script = lambda prompt: never
    desk = desk_on(store, first, clock)
    batch = await submitted(desk, CONTENT)
    leaving = start(desk)
    await first.begun.wait()
    await leaving.aclose()
    assert first.running == 0
    start(desk_on(store, second, clock))
    assert (await ended(desk, batch)).status is Status.COMPLETED


async def test_who_lost_its_claim_stops(store: SqliteStore, clock: ManualClock, start: Start) -> None:
    service = FakeService()
    never = asyncio.Event()
    service.script = lambda prompt: never
    desk = desk_on(store, service, clock)
    batch = await submitted(desk, CONTENT)
    start(desk)
    await service.begun.wait()
    clock.advance(module.times.BATCH_LEASE_S)
    while not await store.claim(f"batch.{batch.id}", "somebody else", 1e9):
        clock.advance(module.times.BATCH_LEASE_S)
    while service.running:  # noqa: ASYNC110 - it learns of it with its next beat
        await asyncio.sleep(0.005)
    assert (await desk.batches.find(OWNER, batch.id)).status is Status.IN_PROGRESS


async def test_a_cancellation_is_heard_at_once(
    store: SqliteStore, clock: ManualClock, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.times, "BATCH_LOOK_S", 1000.0)
    monkeypatch.setattr(module.times, "BATCH_BEAT_S", 1000.0)
    service = FakeService()
    never = asyncio.Event()
    service.script = lambda prompt: never
    desk = desk_on(store, service, clock)
    start(desk)
    batch = await submitted(desk, CONTENT)
    await service.begun.wait()
    await desk.batches.cancel(OWNER, batch.id)
    assert (await ended(desk, batch)).counts == Counts(6, 0, 6)


async def test_other_models_are_left_to_others_until_they_expire(
    store: SqliteStore, clock: ManualClock, start: Start
) -> None:
    first, second = FakeService(), FakeService(["another"])
    never = asyncio.Event()
    first.script = lambda prompt: never
    desk = desk_on(store, first, clock)
    batch = await submitted(desk, CONTENT)
    leaving = start(desk)
    await first.begun.wait()
    await leaving.aclose()
    start(desk_on(store, second, clock))
    await asyncio.sleep(0.05)
    assert (await desk.batches.find(OWNER, batch.id)).status is Status.IN_PROGRESS
    clock.now = batch.expires_at
    assert (await ended(desk, batch)).status is Status.EXPIRED
    assert not second.asked


async def test_a_store_that_is_gone_for_a_while_is_waited_for(
    store: SqliteStore, clock: ManualClock, start: Start
) -> None:
    desk = desk_on(store, FakeService(), clock)
    batch = await submitted(desk, CONTENT)
    page, failures = store.page, [0]

    async def gone(*args: Any, **options: Any) -> Any:
        failures[0] += 1
        if failures[0] < 5:
            raise unavailable("gone", 1.0) if failures[0] % 2 else RuntimeError("a fault of ours")
        return await page(*args, **options)

    store.page = gone  # type: ignore[method-assign]
    start(desk)
    assert (await ended(desk, batch)).status is Status.COMPLETED


async def test_a_batch_that_cannot_be_read_is_in_nobodys_way(
    store: SqliteStore, clock: ManualClock, start: Start
) -> None:
    desk = desk_on(store, FakeService(), clock)
    for i in range(module.MAX_AT_ONCE):
        broken = await submitted(desk, CONTENT)
        await store.put("batches", broken.id, b"{", owner=OWNER)
        await store.put(OPEN, f"batch_{i}", b"\xff", owner="")
    start(desk)
    batch = await submitted(desk, CONTENT)
    async with asyncio.timeout(60):
        assert (await ended(desk, batch)).status is Status.COMPLETED


def test_tenants_take_turns() -> None:
    work = [Work(f"b{i}", owner, "", 0) for i, owner in enumerate("aaabbc")]
    assert [each.batch_id for each in in_turn(work, [])] == ["b0", "b3", "b5", "b1", "b4", "b2"]
    assert [each.batch_id for each in in_turn(work, work[:2])] == ["b3", "b5", "b4", "b2"]
