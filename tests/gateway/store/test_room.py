"""The store room for a tenant's tickets, by itself, on a real store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.keys.flaky_store import FlakyStore
from tests.gateway.store.redis_server import running_redis
from tests.gateway.tickets.test_tickets import shared

from pagoda_gateway.store.interface import Conflict, Store
from pagoda_gateway.store.redis_store import RedisStore
from pagoda_gateway.store.room import NOTHING, Held, Room
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_gateway.store.tickets import JOBS, Found, KeptTickets, Ticket
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

KEPT_S = 86_400.0


class Watched:
    """A `Store` that counts its calls. `before_delete` is called once, before the next deletion."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: dict[str, int] = {}
        self.before_delete: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name == "delete" and (hook := self.before_delete) is not None:
                self.before_delete = None
                await hook()
            return await method(*arguments, **named)

        return call


async def fill(
    kept: KeptTickets, count: int, name: str = "old", num_bytes: int = 7, ago_s: float = 1000.0
) -> list[Found]:
    """Tickets that ended that long ago, or still run (0)."""
    found = []
    for i in range(count):
        job_id, ended_at = f"{name}{i}", time.time() - ago_s if ago_s else 0.0
        ticket = Ticket(digest="d", path="/p", job_id=job_id, num_bytes=num_bytes, ended_at=ended_at)
        found.append(await kept.begin(f"stream_{job_id}", "", ticket, b"job"))
    return found


async def take(room: Room, num_bytes: int, number: int = 1) -> None:
    """Take room as for something that is about to be written."""
    async with room.taking("", num_bytes, number):
        pass


async def refused(room: Room, num_bytes: int = 1) -> PagodaError:
    with pytest.raises(PagodaError) as caught:
        await take(room, num_bytes)
    return caught.value


async def test_the_oldest_go_and_with_them_all_that_there_is_of_them() -> None:
    async with shared() as store:
        kept = KeptTickets(store, KEPT_S)
        await fill(kept, 4)
        await store.append("ticket/old0/answer", [b"answer"], index=0)
        await take(Room(kept, 4, 10**9), 1)
        await kept.aclose()
        assert [await kept.find(f"stream_old{i}", "") is None for i in range(4)] == [True, False, False, False]
        assert await store.get(JOBS, "old0") is None
        assert await store.length("ticket/old0/answer") == 0


async def test_what_never_fits_is_refused_and_forgets_nothing() -> None:
    async with shared() as store:
        kept = KeptTickets(store, KEPT_S)
        await fill(kept, 20)
        assert (await refused(Room(kept, 1000, 4000), 5000)).code is ErrorCode.REQUEST_TOO_LARGE
        assert (await kept.held_by("")).number == 20


async def test_where_too_little_would_go_nothing_does() -> None:
    async with shared() as store:
        kept = KeptTickets(store, KEPT_S)
        await fill(kept, 5, num_bytes=100)
        await fill(kept, 5, "run", num_bytes=700, ago_s=0.0)
        assert (await refused(Room(kept, 1000, 4000), 900)).code is ErrorCode.RATE_LIMITED
        assert (await kept.held_by("")).number == 10


@pytest.mark.parametrize(("ago_s", "least_s", "most_s"), [((50.0, 20.0), 35.0, 40.0), ((50.0, 0.0), 55.0, 60.0)])
async def test_the_wait_is_until_enough_has_rested(ago_s: tuple[float, float], least_s: float, most_s: float) -> None:
    """Both tickets must go; a running one starts to rest at its end."""
    async with shared() as store:
        kept = KeptTickets(store, KEPT_S)
        for i, ago in enumerate(ago_s):
            await fill(kept, 1, f"t{i}", num_bytes=400, ago_s=ago)
        wait_s = (await refused(Room(kept, 10, 1000), 900)).retry_after_s
        assert wait_s is not None
        assert least_s <= wait_s <= most_s


async def test_what_rests_is_kept_for_a_minute_and_in_the_background_for_an_hour() -> None:
    now = time.time()
    plain = Ticket(digest="", path="", job_id="", num_bytes=0, ended_at=now - 30.0)
    assert plain.rests_s(now) == pytest.approx(30.0, abs=0.01)
    background = Ticket(digest="", path="", job_id="", num_bytes=0, ended_at=now - 30.0, background=True)
    assert background.rests_s(now) == pytest.approx(3570.0, abs=0.01)
    assert plain.rests_s(now - 7200.0) == 0.0, "a clock was two hours ahead"


async def test_who_is_refused_does_not_look_again_for_a_while() -> None:
    async with shared() as raw:
        store, now = Watched(raw), [0.0]
        kept = KeptTickets(store, KEPT_S)
        await fill(kept, 3, ago_s=0.0)
        room = Room(kept, 3, 10**9, lambda: now[0])
        await refused(room)
        store.calls.clear()
        for _ in range(20):
            await refused(room)
        assert store.calls == {}
        now[0] = times.TICKETS_FRESH_S
        await refused(room)
        assert store.calls["page"] > 0


async def test_who_is_refused_looks_again_when_something_is_gone() -> None:
    """A deletion here makes it look again, and then it also finds deletions at other gateways."""
    async with shared() as store:
        kept, other = KeptTickets(store, KEPT_S), KeptTickets(store, KEPT_S)
        room, (mine, *others) = Room(kept, 3, 10**9, lambda: 0.0), await fill(kept, 4, ago_s=0.0)
        await refused(room)
        for found in others:
            await other.delete(found)
        await refused(room)
        room.freed("", await kept.delete(mine))
        await take(room, 1)


async def test_nothing_goes_for_what_is_gone_already() -> None:
    """Another gateway deleted it, without telling this one."""
    async with shared() as store:
        kept, other = KeptTickets(store, KEPT_S), KeptTickets(store, KEPT_S)
        room = Room(kept, 10, 10**9)
        await fill(kept, 5)
        for i in range(8):
            await take(room, 7)
            (found,) = await fill(kept, 1, f"new{i}_")
            await other.delete(found)
        assert await kept.held_by("") == Held(5, 35)


async def test_what_is_still_being_written_has_its_room_whenever_it_is_counted() -> None:
    async with shared() as store:
        kept = KeptTickets(store, KEPT_S)
        await fill(kept, 3, ago_s=0.0)
        room = Room(kept, 4, 10**9)
        async with room.taking("", 7):
            assert (await refused(room)).code is ErrorCode.RATE_LIMITED
        assert (await refused(room)).code is ErrorCode.RATE_LIMITED


@pytest.mark.parametrize("end", ["conflict", "deleted"])
async def test_what_is_known_to_be_gone_is_not_counted_for(end: str) -> None:
    async with shared() as raw:
        store = Watched(raw)
        kept = KeptTickets(store, KEPT_S)
        (first, *_) = await fill(kept, 3, ago_s=0.0)
        room = Room(kept, 4, 10**9)
        for _ in range(6):
            with suppress(Conflict):
                async with room.taking("", 7):
                    (found,) = await fill(kept, 1, "new", ago_s=0.0)
                    if end == "conflict":
                        await kept.delete(found)
                        await kept.begin(first.name, "", first.ticket, b"job")
            if end == "deleted":
                room.freed("", await kept.forget(found))
                room.freed("", await kept.forget(found))
        await take(room, 1)
        assert store.calls["page"] == 1
        await take(room, 1)
        assert store.calls["page"] == 2, "and nothing is taken for gone twice"


@pytest.mark.parametrize("written", [False, True])
async def test_what_its_writer_left_is_there_or_is_not(written: bool) -> None:
    async with shared() as store:
        kept = KeptTickets(store, KEPT_S)
        room, writing = Room(kept, 1, 10**9), asyncio.Event()

        async def write() -> None:
            async with room.taking("", 7):
                if written:
                    await fill(kept, 1, ago_s=0.0)
                writing.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(write())
        await writing.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if written:
            assert (await refused(room)).code is ErrorCode.RATE_LIMITED
        else:
            await take(room, 7)


async def test_one_that_was_begun_anew_meanwhile_is_not_deleted() -> None:
    async with shared() as raw:
        store, other = Watched(raw), KeptTickets(raw, KEPT_S)
        (old,) = await fill(other, 1)

        async def anew() -> None:
            await other.delete(old)
            await other.begin(old.name, "", Ticket(digest="", path="", job_id="new", num_bytes=7), b"job")

        store.before_delete = anew
        assert await KeptTickets(store, KEPT_S).forget_oldest("", Held(1, 0), NOTHING) == (NOTHING, 0.0)
        found = await other.find(old.name, "")
        assert found is not None
        assert found.ticket.job_id == "new"


async def test_who_leaves_in_the_midst_of_it_leaves_no_answers_behind() -> None:
    async with shared() as raw:
        store = Watched(raw)
        kept = KeptTickets(store, KEPT_S)
        for found in await fill(kept, 8):
            await raw.append(f"ticket/{found.ticket.job_id}/answer", [b"answer"], index=0)
        room, deleting = Room(kept, 4, 10**9), asyncio.Event()

        async def for_long() -> None:
            deleting.set()
            await asyncio.Event().wait()

        store.before_delete = for_long
        taking = asyncio.create_task(take(room, 1))
        await deleting.wait()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        async with asyncio.timeout(60):
            await take(room, 1)
        await kept.aclose()
        logs = [i for i in range(8) if await raw.length(f"ticket/old{i}/answer")]
        assert len(logs) == (await kept.held_by("")).number == 3


async def test_those_who_wait_for_a_store_that_hangs_can_leave() -> None:
    store = FlakyStore()
    room = Room(KeptTickets(store, KEPT_S), 4, 10**9)
    store.answers.clear()
    takes = [asyncio.create_task(take(room, 1)) for _ in range(3)]
    await store.asked.wait()
    for taking in takes:
        taking.cancel()
    await asyncio.gather(*takes, return_exceptions=True)
    store.answers.set()
    async with asyncio.timeout(60):
        await take(room, 1)
    await store.aclose()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_two_gateways_make_room_at_the_same_time(tmp_path: Path, kind: str) -> None:
    async with running_redis() as server:
        stores = [SqliteStore(f"{tmp_path}/s.db") if kind == "sqlite" else RedisStore(server.address) for _ in "12"]
        kepts = [KeptTickets(store, KEPT_S) for store in stores]
        await fill(kepts[0], 100)
        rooms = [Room(kept, 100, 10**9) for kept in kepts]

        async def ask(i: int) -> None:
            await take(rooms[i % 2], 5)
            await kepts[i % 2].begin(
                f"stream_n{i}", "", Ticket(digest="", path="", job_id=f"n{i}", num_bytes=5), b"job"
            )

        await asyncio.gather(*map(ask, range(60)))
        await asyncio.gather(*(kept.aclose() for kept in kepts))
        held = await kepts[0].held_by("")
        assert 60 <= held.number <= 120
        assert len((await stores[0].page(JOBS, "", limit=1000)).records) == held.number
        for store in stores:
            await store.aclose()


async def test_beyond_the_number_an_answer_still_has_room() -> None:
    store = SqliteStore(MEMORY)
    kept = KeptTickets(store, KEPT_S)
    await fill(kept, 4, ago_s=0.0)
    room = Room(kept, 2, 10**9)
    await take(room, 100, number=0)
    assert (await refused(room)).code is ErrorCode.RATE_LIMITED
    await store.aclose()


async def test_what_its_gateway_left_without_a_word_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared() as store:
        kept = KeptTickets(store, KEPT_S)
        left = await fill(kept, 3, ago_s=0.0)
        await kept.claim(left[0].name, "who runs it", 10**6)
        later = time.time() + times.TICKET_LEASE_S + 1
        monkeypatch.setattr(time, "time", lambda: later)
        await take(Room(kept, 3, 10**9), 1)
        found = [await kept.find(one.name, "") for one in left]
        assert [one is not None for one in found] == [True, False, True]
