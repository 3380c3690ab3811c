"""A batch ends from whatever state it is in, with every line in one of its files exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest
from tests.fakes import ManualClock
from tests.gateway.batches.fakes import OWNER, FakeService, desk_on, ids, line, rows, submitted

from pagoda_gateway.batches import work as module
from pagoda_gateway.batches.batch import WINDOW_S, Batch, Counts, Status, results_log
from pagoda_gateway.batches.batches import OPEN, Work
from pagoda_gateway.batches.results import Results
from pagoda_gateway.batches.work import BatchWork, Desk
from pagoda_gateway.store.interface import unavailable
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem

NUM_LINES = 12
NAMES = [f"id{i:02d}" for i in range(NUM_LINES)]
CONTENT = b"".join(map(line, NAMES))


class Failing(SqliteStore):
    """Every n-th writing call fails, before or after writing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(MEMORY, clock)
        self.every = 0
        self.calls = 0

    async def append(
        self, log: str, parts: Sequence[bytes], *, index: int | None = None, expires_at: float | None = None
    ) -> int:
        self.calls += 1
        if self.every and self.calls % self.every == 0:
            raise unavailable("before", 0.0)
        length = await super().append(log, parts, index=index, expires_at=expires_at)
        if self.every and self.calls % self.every == 1:
            raise unavailable("after", 0.0)
        return length


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000.0)


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[Failing]:
    store = Failing(clock)
    yield store
    await store.aclose()


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def desk(store: Failing, service: FakeService, clock: ManualClock) -> Desk:
    return desk_on(store, service, clock)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.times, "BATCH_AGAIN_S", 0.001)


def work_on(desk: Desk, batch: Batch) -> BatchWork:
    return BatchWork(desk, Work(batch.id, OWNER, batch.model, batch.expires_at))


async def run(desk: Desk, batch: Batch) -> Batch:
    await work_on(desk, batch).run()
    ended = await desk.batches.find(OWNER, batch.id)
    assert ended.has_ended()
    assert not (await desk.batches.store.page(OPEN, "", limit=1)).records
    assert await desk.batches.store.length(results_log(batch.id)) == 0
    return ended


async def test_every_line_is_answered_once(desk: Desk, service: FakeService) -> None:
    ended = await run(desk, await submitted(desk, CONTENT))
    assert (ended.status, ended.counts, ended.model) == (Status.COMPLETED, Counts(NUM_LINES, NUM_LINES, 0), "m")
    assert await ids(desk, ended.output_id) == NAMES
    for row in await rows(desk, ended.output_id):
        assert row["response"]["body"] == {"echo": row["custom_id"]}
        assert set(row) == {"id", "custom_id", "response", "error"}
    with pytest.raises(PagodaError):
        await desk.files.find(OWNER, ended.errors_id)
    assert set(service.asked.values()) == {1}
    assert service.most_running <= 4
    info = await desk.files.find(OWNER, ended.output_id)
    assert (info.purpose, info.filename) == ("batch_output", f"{ended.id}_output.jsonl")


async def test_a_line_that_is_refused_or_fails_is_in_the_error_file(desk: Desk, service: FakeService) -> None:
    told: list[bool] = []
    desk = replace(desk, on_result=told.append)
    errors = {"id01": InvalidParams([Problem("prompt", "is bad")]), "id02": RuntimeError("a fault of ours")}
    service.script = errors.get
    ended = await run(desk, await submitted(desk, CONTENT))
    assert (ended.status, ended.counts) == (Status.COMPLETED, Counts(NUM_LINES, NUM_LINES - 2, 2))
    bad, fault = sorted(await rows(desk, ended.errors_id), key=lambda row: str(row["custom_id"]))
    assert (bad["custom_id"], bad["response"]["status_code"], bad["error"]) == ("id01", 400, None)
    assert bad["response"]["body"]["error"]["param"] == "prompt"
    assert (fault["custom_id"], fault["response"]["status_code"]) == ("id02", 500)
    assert "fault of ours" not in str(fault)
    assert await ids(desk, ended.output_id) == [name for name in NAMES if name not in errors]
    assert sorted(told) == [False] * (NUM_LINES - 2) + [True] * 2


async def test_what_finds_no_room_is_tried_again(desk: Desk, service: FakeService) -> None:
    def script(prompt: str) -> Exception | None:
        return PagodaError(ErrorCode.OVERLOADED, "full") if service.asked[prompt] < 3 else None

    service.script = script
    ended = await run(desk, await submitted(desk, CONTENT))
    assert ended.counts == Counts(NUM_LINES, NUM_LINES, 0)
    assert set(service.asked.values()) == {3}


@pytest.mark.parametrize("content", [b"", b"{\n", CONTENT + line("id00"), line("a", url="/v1/chat/completions")])
async def test_an_input_with_a_fault_is_refused_whole(desk: Desk, service: FakeService, content: bytes) -> None:
    ended = await run(desk, await submitted(desk, content or b"\n"))
    assert (ended.status, len(ended.faults)) == (Status.FAILED, 1)
    assert not service.asked


async def test_a_line_that_is_too_long_is_a_fault(desk: Desk) -> None:
    ended = await run(desk, await submitted(desk, CONTENT + line("x" * 100_000)))
    assert [(fault.code, fault.line) for fault in ended.faults] == [("line_too_long", NUM_LINES + 1)]


async def test_an_input_that_is_gone_is_a_fault(desk: Desk) -> None:
    batch = await submitted(desk, CONTENT)
    await desk.files.delete(OWNER, batch.input_file_id)
    ended = await run(desk, batch)
    assert [fault.code for fault in ended.faults] == ["input_file_gone"]


async def test_an_input_that_goes_away_ends_it_with_what_is_done(desk: Desk, service: FakeService) -> None:
    batch = await submitted(desk, CONTENT)
    await cut_short(desk, batch, service, after=5)
    await desk.files.delete(OWNER, batch.input_file_id)
    service.script = lambda prompt: None
    ended = await run(desk, batch)
    assert ended.status is Status.FAILED
    assert [fault.code for fault in ended.faults] == ["input_file_gone"]
    assert len(await ids(desk, ended.output_id)) == ended.counts.completed >= 5


async def cut_short(desk: Desk, batch: Batch, service: FakeService, after: int) -> None:
    """Work until `after` lines are answered and the others hang, then kill the process."""
    never = asyncio.Event()
    service.script = lambda prompt: None if prompt < NAMES[after] else never
    working = asyncio.create_task(work_on(desk, batch).run())
    seen = Results(desk.batches.store, results_log(batch.id))
    while seen.num_lines < after:
        await asyncio.sleep(0.001)
        await seen.load()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


@pytest.mark.parametrize("after", [1, 6, 11])
async def test_who_goes_on_answers_only_what_is_left(
    desk: Desk, store: Failing, service: FakeService, clock: ManualClock, after: int
) -> None:
    batch = await submitted(desk, CONTENT)
    await cut_short(desk, batch, service, after)
    assert service.running == 0
    successor = FakeService()
    ended = await run(desk_on(store, successor, clock), batch)
    assert ended.counts == Counts(NUM_LINES, NUM_LINES, 0)
    assert await ids(desk, ended.output_id) == NAMES
    assert 0 < len(successor.asked) < NUM_LINES


async def test_two_who_do_not_know_of_each_other_write_every_line_once(
    desk: Desk, store: Failing, clock: ManualClock
) -> None:
    batch = await submitted(desk, CONTENT)
    other = FakeService()
    await asyncio.gather(*(work_on(each, batch).run() for each in (desk, desk_on(store, other, clock))))
    ended = await desk.batches.find(OWNER, batch.id)
    assert (ended.status, ended.counts) == (Status.COMPLETED, Counts(NUM_LINES, NUM_LINES, 0))
    assert await ids(desk, ended.output_id) == NAMES


async def test_who_slept_until_all_was_over_changes_nothing(
    desk: Desk, store: Failing, service: FakeService, clock: ManualClock
) -> None:
    batch = await submitted(desk, CONTENT)
    asleep = asyncio.Event()
    service.script = lambda prompt: asleep
    sleeping = asyncio.create_task(work_on(desk, batch).run())
    await service.begun.wait()
    ended = await run(desk_on(store, FakeService(), clock), batch)
    asleep.set()
    await sleeping
    assert await desk.batches.find(OWNER, batch.id) == ended
    assert await ids(desk, ended.output_id) == NAMES
    assert await store.length(results_log(batch.id)) == 0


async def test_a_batch_that_the_store_has_lost_is_let_go(desk: Desk, store: Failing) -> None:
    batch = await submitted(desk, CONTENT)
    await store.delete("batches", batch.id)
    await work_on(desk, batch).run()
    assert not (await store.page(OPEN, "", limit=1)).records


async def test_a_store_that_has_lost_results_has_them_made_again(
    desk: Desk, store: Failing, service: FakeService
) -> None:
    """As after restoring an older backup."""
    batch = await submitted(desk, CONTENT)
    asleep = asyncio.Event()
    service.script = lambda prompt: None if prompt < NAMES[6] else asleep
    working = asyncio.create_task(work_on(desk, batch).run())
    log, seen = results_log(batch.id), Results(store, results_log(batch.id))
    while seen.num_lines < 6:
        await asyncio.sleep(0.001)
        await seen.load()
    (first, *_) = await store.read(log)
    await store.drop(log)
    await store.append(log, [first])
    asleep.set()
    async with asyncio.timeout(60):
        await working
    ended = await desk.batches.find(OWNER, batch.id)
    assert (ended.status, ended.counts) == (Status.COMPLETED, Counts(NUM_LINES, NUM_LINES, 0))
    assert await ids(desk, ended.output_id) == NAMES


@pytest.mark.parametrize("every", [2, 3, 5])
async def test_a_store_that_comes_and_goes_costs_nothing(desk: Desk, store: Failing, every: int) -> None:
    batch = await submitted(desk, CONTENT)
    store.every = every
    ended = await run(desk, batch)
    assert ended.counts == Counts(NUM_LINES, NUM_LINES, 0)
    assert await ids(desk, ended.output_id) == NAMES


async def test_a_batch_that_is_cancelled_keeps_what_is_done(desk: Desk, service: FakeService) -> None:
    batch = await submitted(desk, CONTENT)
    never = asyncio.Event()
    service.script = lambda prompt: None if prompt < NAMES[3] else never
    working = work_on(desk, batch)
    running = asyncio.create_task(working.run())
    while service.asked.total() < 7:  # noqa: ASYNC110 - three are answered, four hang
        await asyncio.sleep(0.001)
    await desk.batches.cancel(OWNER, batch.id)
    await working.look()
    await running
    ended = await desk.batches.find(OWNER, batch.id)
    assert (ended.status, ended.counts) == (Status.CANCELLED, Counts(NUM_LINES, 3, NUM_LINES - 3))
    assert await ids(desk, ended.output_id) == NAMES[:3]
    assert await ids(desk, ended.errors_id) == NAMES[3:]
    assert {row["error"]["code"] for row in await rows(desk, ended.errors_id)} == {"batch_cancelled"}
    assert (service.running, service.most_running) == (0, 4)
    assert desk.slots._value == 4


async def test_a_batch_that_is_cancelled_before_it_began_answers_nothing(desk: Desk, service: FakeService) -> None:
    batch = await submitted(desk, CONTENT)
    await desk.batches.cancel(OWNER, batch.id)
    ended = await run(desk, batch)
    assert (ended.status, ended.counts) == (Status.CANCELLED, Counts(NUM_LINES, 0, NUM_LINES))
    assert not service.asked


async def test_what_is_left_at_the_end_of_the_window_has_expired(
    desk: Desk, service: FakeService, clock: ManualClock
) -> None:
    batch = await submitted(desk, CONTENT)
    await cut_short(desk, batch, service, after=4)
    service.asked.clear()
    clock.advance(WINDOW_S)
    ended = await run(desk, batch)
    assert (ended.status, ended.ended_at) == (Status.EXPIRED, int(clock.now))
    assert {row["error"]["code"] for row in await rows(desk, ended.errors_id)} == {"batch_expired"}
    assert await ids(desk, ended.output_id) + await ids(desk, ended.errors_id) == NAMES
    assert not service.asked


async def test_a_look_tells_how_far_it_is(desk: Desk, service: FakeService, clock: ManualClock) -> None:
    batch = await submitted(desk, CONTENT)
    never = asyncio.Event()
    service.script = lambda prompt: None if prompt < NAMES[3] else never
    working = work_on(desk, batch)
    running = asyncio.create_task(working.run())
    seen = batch
    while seen.counts.completed < 3:
        await asyncio.sleep(0.001)
        await working.look()
        seen = await desk.batches.find(OWNER, batch.id)
    assert (seen.status, seen.counts) == (Status.IN_PROGRESS, Counts(NUM_LINES, 3, 0))
    clock.advance(WINDOW_S)
    await working.look()
    await running
    assert (await desk.batches.find(OWNER, batch.id)).status is Status.EXPIRED
