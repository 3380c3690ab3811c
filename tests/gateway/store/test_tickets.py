"""Answers of tickets: whoever runs one, is late, is killed or deletes it, every answer that is read is whole, and every
unreferenced one is deleted."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_gateway.store.interface import MAX_PART_BYTES, Conflict, Store
from pagoda_gateway.store.sqlite_store import SqliteStore
from pagoda_gateway.store.tickets import JOBS, Found, KeptTickets, Ticket

KEPT_S = 3600.0
NAME, OWNER = "stream_n", "me"
RUNNERS = {"first": "first", "again": "first", "second": "second", "third": "third"}
ANSWERS = {who: who.encode() * (MAX_PART_BYTES // 4) for who in RUNNERS}  # of at least two parts


class Kept(KeptTickets):
    """Tickets in a store in a file; lists the logs that exist."""

    def __init__(self, store: Store, path: Path) -> None:
        super().__init__(store, KEPT_S)
        self._path = path

    def logs(self) -> list[tuple[str, float | None]]:
        """Names and expiry times."""
        connection = sqlite3.connect(self._path)
        try:
            return connection.execute("SELECT log, expires_at FROM logs ORDER BY log").fetchall()
        finally:
            connection.close()


@asynccontextmanager
async def shared(turns: Turns | None = None) -> AsyncIterator[Kept]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        store = SqliteStore(str(path), scratch=True)
        try:
            yield Kept(store if turns is None else turns.of(store), path)
        finally:
            await store.aclose()


async def begun(kept: KeptTickets, **fields: Any) -> Found:
    ticket = Ticket(digest="d", path="/p", job_id="j", num_bytes=3, stream=True, runner="first")
    found = await kept.begin(NAME, OWNER, ticket, b"job")
    return await kept.change(found, **fields) if fields else found


async def there(kept: KeptTickets) -> Found:
    found = await kept.find(NAME, OWNER)
    assert found is not None
    return found


async def test_an_answer_that_comes_late_replaces_nobodys_and_leaves_nothing() -> None:
    async with shared() as kept:
        first = await begun(kept)
        second = await kept.change(first, runner="second")
        with pytest.raises(Conflict):
            await kept.keep_answer(first, b"of other weights")
        assert await kept.keep_answer(second, b"tokens")
        with pytest.raises(Conflict):
            await kept.keep_answer(first, b"of other weights")
        found = await there(kept)
        assert found.ticket.answered
        assert await kept.answer(found) == b"tokens"
        assert len(kept.logs()) == 1


async def test_a_second_run_of_the_same_gateway_that_found_the_same_leaves_what_the_first_kept() -> None:
    async with shared() as kept:
        found = await begun(kept)
        assert await kept.keep_answer(found, b"tokens")
        with pytest.raises(Conflict):
            await kept.keep_answer(found, b"of other weights")
        assert await kept.answer(await there(kept)) == b"tokens"
        assert len(kept.logs()) == 1


async def test_an_answer_made_anew_takes_the_place_of_the_old_one() -> None:
    """As when the stored answer cannot be read."""
    async with shared() as kept:
        found = await begun(kept)
        assert await kept.keep_answer(found, b"damaged")
        found = await kept.change(await there(kept), runner="second", ended_at=0.0)
        assert await kept.keep_answer(found, b"whole answer")
        found = await there(kept)
        assert await kept.answer(found) == b"whole answer"
        assert found.ticket.num_bytes == 3 + len(b"whole answer")
        assert len(kept.logs()) == 1


async def test_what_an_earlier_version_kept_is_told_and_deleted() -> None:
    async with shared() as kept:
        found = await begun(kept, answered=True)
        await kept._store.append("ticket/j/answer", [b"to", b"kens"], index=0)
        assert await kept.answer(found) == b"tokens"
        await kept.forget(found)
        assert kept.logs() == []


async def test_what_is_deleted_goes_with_the_answer_that_was_kept_since_it_was_found() -> None:
    async with shared() as kept:
        found = await begun(kept)
        assert await kept.keep_answer(found, b"tokens")
        await kept.delete(found)
        assert await kept.find(NAME, OWNER) is None
        assert kept.logs() == []
        anew = await begun(kept)
        assert await kept.keep_answer(anew, b"tokens")
        await kept.delete(found)
        assert len(kept.logs()) == 0, "of the same job"


async def test_another_request_under_the_same_key_is_not_deleted_for_the_one_before() -> None:
    async with shared() as kept:
        found = await begun(kept)
        await kept.delete(found)
        other = Ticket(digest="d", path="/p", job_id="other", num_bytes=3, runner="first")
        assert await kept.keep_answer(await kept.begin(NAME, OWNER, other, b"job"), b"tokens")
        await kept.delete(found)
        assert await kept.answer(await there(kept)) == b"tokens"


async def test_a_ticket_that_is_written_twice_keeps_its_job() -> None:
    """As when two gateways running it write it after the store lost everything; but not another request's job."""
    async with shared() as kept:
        found = await begun(kept)
        with pytest.raises(Conflict):
            await begun(kept)
        assert await kept.job(found) == b"job"
        other = Ticket(digest="d", path="/p", job_id="other", num_bytes=3)
        with pytest.raises(Conflict):
            await kept.begin(NAME, OWNER, other, b"other job")
        assert await kept._store.get(JOBS, "other") is None
        assert await kept.job(found) == b"job"


@pytest.mark.parametrize("job", [b'{"id": "j", "ticket": "stream_n"}', b""])
async def test_a_ticket_is_found_by_its_job_as_long_as_it_is_that_ones(job: bytes) -> None:
    async with shared() as kept:
        ticket = Ticket(digest="d", path="/p", job_id="j", num_bytes=3, background=not job)
        found = await kept.begin(NAME, OWNER, ticket, job)
        assert await kept.of_job("j", OWNER) == found
        assert await kept.of_job("j", "somebody") is None
        assert await kept.of_job("other", OWNER) is None
        await kept.let_go(found)
        assert await kept._store.get(JOBS, "j") is None
        await kept.begin(NAME, OWNER, msgspec.structs.replace(ticket, job_id="other"), job)
        await kept._store.put(JOBS, "j", job or b'{"ticket": "stream_n"}', owner=OWNER)
        assert await kept.of_job("j", OWNER) is None, "its key is another one's now"
        await kept._store.put(JOBS, "j", b"of another version", owner=OWNER)
        assert await kept.of_job("j", OWNER) is None


class Turns:
    """A `Store` whose calls wait until it is their caller's turn."""

    def __init__(self) -> None:
        self._store: Any = None
        self._waiting: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self.killed: set[str] = set()

    def of(self, store: Store) -> Any:
        self._store = store
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            if (task := asyncio.current_task()) is not None and task.get_name() in self._tasks:
                turn = self._waiting[task.get_name()] = asyncio.Event()
                self._changed.set()
                await turn.wait()
            return await method(*arguments, **named)

        return call

    def begin(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks[name] = task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda _: self._changed.set())

    async def waiting(self) -> list[str]:
        """Who can continue, once all callers wait or have ended."""
        while any(name not in self._waiting and not task.done() for name, task in self._tasks.items()):
            self._changed.clear()
            await self._changed.wait()
        return sorted(self._waiting)

    def go_on(self, name: str) -> None:
        self._waiting.pop(name).set()

    async def kill(self, name: str) -> None:
        del self._waiting[name]
        self.killed.add(name)
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)

    def check(self) -> None:
        for name, task in self._tasks.items():
            if name not in self.killed and (error := task.exception()) is not None:
                assert isinstance(error, Conflict)


async def run(kept: KeptTickets, who: str) -> None:
    """As a gateway that finds the ticket: it writes to it only on a takeover, not when it runs its own again."""
    if (found := await kept.find(NAME, OWNER)) is None:
        return
    if not found.ticket.answered:
        runner = RUNNERS[who]
        found = found if found.ticket.runner == runner else await kept.change(found, runner=runner)
        await kept.keep_answer(found, ANSWERS[who])


async def forget(kept: KeptTickets) -> None:
    if (found := await kept.find(NAME, OWNER)) is not None:
        await kept.forget(found)


@given(data=st.data(), several=st.sets(st.sampled_from([*RUNNERS, "client"]), min_size=2))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_in_what_order_an_answer_is_whole_and_nothing_is_left(
    data: st.DataObject, several: set[str]
) -> None:
    async def story() -> None:
        turns = Turns()
        async with shared(turns) as kept:
            await begun(kept)
            for who in sorted(several):
                turns.begin(who, forget(kept) if who == "client" else run(kept, who))
            while names := await turns.waiting():
                name = data.draw(st.sampled_from(names))
                if data.draw(st.sampled_from([False] * 9 + [True])):
                    await turns.kill(name)
                else:
                    turns.go_on(name)
            turns.check()
            await _checked(kept, turns, several)

    asyncio.run(story())


async def _checked(kept: Kept, turns: Turns, several: set[str]) -> None:
    found = await kept.find(NAME, OWNER)
    soonest = time.time() + KEPT_S / 2
    assert all(expires_at is not None and soonest < expires_at <= time.time() + KEPT_S for _, expires_at in kept.logs())
    if found is not None and found.ticket.answered:
        answer = await kept.answer(found)
        assert answer in ANSWERS.values()
        assert found.ticket.num_bytes == 3 + len(answer)
    if not turns.killed:
        assert (found is None) == ("client" in several)
        assert len(kept.logs()) == (0 if found is None else 1)
    await forget(kept)
    if not turns.killed:
        assert kept.logs() == []
