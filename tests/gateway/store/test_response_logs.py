"""Whatever is interrupted, and however many write at once: what is kept is whole, and what is not kept is deleted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest
import pytest_asyncio
from tests.gateway.store.breaking_store import Breaking, How, Interleaved, Killed
from tests.gateway.store.redis_server import running_redis

from pagoda_gateway.store.interface import MAX_PAGE_BYTES, Conflict, Store
from pagoda_gateway.store.opening import open_store
from pagoda_gateway.store.response_logs import LOOSE, log_of, new_content, records_of
from pagoda_gateway.store.responses import RESPONSES, UNFINISHED, Kept, KeptResponses
from pagoda_gateway.store.room import Held
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

ITEMS, OBJECT, JOB, EVENT = b'[{"id":"a"}]', b'{"output":[]}', b'{"head":{}}', b'event: e\ndata: {"n":1}\n\n'
ME = "me"
_numbers = itertools.count(1)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(params=["memory", "redis"], scope="module", loop_scope="module")
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "redis":
        async with running_redis() as server:
            store = open_store(server.address)
            yield store
            await store.aclose()
        return
    store = open_store("")
    yield store
    await store.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def store(opened: Store) -> AsyncIterator[Breaking]:
    """Contains nothing from earlier tests."""
    store = Breaking(opened)
    yield store
    store.mend()
    for collection, owner in ((RESPONSES, ME), (RESPONSES, "other"), (UNFINISHED, ""), (LOOSE, "")):
        async for record in records_of(opened, collection, owner):
            await opened.delete(collection, record.key)
    for log in store.logs:
        await opened.drop(log)


def new_name() -> str:
    return f"resp_{next(_numbers):032x}"


async def nothing(kept: KeptResponses, name: str) -> None:
    pass


async def finish(kept: KeptResponses, name: str) -> None:
    await kept.finished(name, ME, ITEMS, OBJECT)


async def begin(kept: KeptResponses, name: str) -> None:
    await kept.begin(name, ME, ITEMS, JOB, streamed=True)


async def begin_and_tell(kept: KeptResponses, name: str) -> None:
    await begin(kept, name)
    await tell(kept, name)


async def tell(kept: KeptResponses, name: str) -> None:
    await kept.reserve(name, ME, 1000)
    await kept.add_events(name, [EVENT], await kept.num_events(name))


async def end(kept: KeptResponses, name: str) -> None:
    record, found = await kept.find(name, ME)
    await kept.end(record, found, OBJECT, new_content())


async def run_to_its_end(kept: KeptResponses, name: str) -> None:
    await begin_and_tell(kept, name)
    await end(kept, name)


async def lose_content(kept: KeptResponses, name: str) -> None:
    """As an earlier version could."""
    await finish(kept, name)
    _, found = await kept.find(name, ME)
    for log in found.logs(name):
        await kept._store.drop(log)


async def cancel(kept: KeptResponses, name: str) -> None:
    await kept.cancel(name, ME)


async def delete(kept: KeptResponses, name: str) -> None:
    await kept.delete(name, ME)


async def forget(kept: KeptResponses, name: str) -> None:
    await kept.forget_oldest(ME, Held(1, 0), Held(0, 0))


Step = Callable[[KeptResponses, str], Awaitable[None]]
STEPS: list[tuple[Step, Step]] = [
    (nothing, finish),
    (lose_content, finish),
    (nothing, begin),
    (begin, tell),
    (begin_and_tell, end),
    (begin_and_tell, cancel),
    (finish, delete),
    (begin_and_tell, delete),
    (run_to_its_end, delete),
    (finish, forget),
    (run_to_its_end, forget),
]


async def swept(store: Breaking) -> KeptResponses:
    """Another gateway, after it has cleaned up what others have left."""
    kept = KeptResponses(store, 3600.0)
    await kept.sweep()
    async for name, owner in kept.unfinished():
        try:
            _, found = await kept.find(name, owner)
        except PagodaError:
            await kept.bury(name, owner)
        else:
            if found.ended:
                await kept.close(name)
    return kept


async def assert_sound(store: Breaking) -> None:
    """Every log that exists is named by a record and counted, and every log that a record names exists."""
    kept, named = await swept(store), set[str]()
    todo = {name async for name, _ in kept.unfinished()}
    async for record in records_of(store, RESPONSES, ME):
        found = msgspec.json.decode(record.value, type=Kept)
        if found.gone:
            continue
        named |= found.logs(record.key)
        assert await kept.items(record.key, found) == msgspec.json.decode(ITEMS)
        if found.ended:
            assert await kept.response(record.key, found) == OBJECT
        else:
            assert record.key in todo
            assert await kept.job(record.key) == JOB
            todo.remove(record.key)
    assert not todo
    assert not [record async for record in records_of(store, LOOSE, "")]
    there = {log: await size(store, log) for log in store.logs}
    assert {log for log, num_bytes in there.items() if num_bytes} <= named
    assert sum(there.values()) <= (await kept.held_by(ME)).num_bytes


async def size(store: Store, log: str) -> int:
    return sum(map(len, await store.read(log)))


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize(("before", "step"), STEPS)
async def test_whatever_breaks_off_leaves_nothing_half(
    store: Breaking, monkeypatch: pytest.MonkeyPatch, before: Step, step: Step, how: How
) -> None:
    for number in itertools.count(1):
        name, kept = new_name(), KeptResponses(store, 3600.0)
        await before(kept, name)
        said, broken = await store.during(step(kept, name), number, how)
        assert not isinstance(said, BaseException) or isinstance(said, PagodaError | Killed | asyncio.CancelledError)
        monkeypatch.setattr(times, "RESPONSE_LOOSE_S", 0.0)
        if before is not lose_content:
            await assert_sound(store)
        if step is finish:
            await finish(await swept(store), name)  # a second attempt keeps it
            _, found = await kept.find(name, ME)
            assert await kept.response(name, found) == OBJECT
            await assert_sound(store)
        monkeypatch.undo()
        async for record in records_of(store, RESPONSES, ME):
            with suppress(PagodaError):
                await kept.delete(record.key, ME)
        if not broken:
            assert number > 1
            return


@pytest.mark.parametrize("how", [How.CANCELLED, How.CANCELLED_OFTEN, How.FULL, How.FULL_ONCE])
async def test_who_could_not_begin_leaves_nothing_that_runs(store: Breaking, how: How) -> None:
    """At once, without waiting for a sweep."""
    for number in itertools.count(1):
        name, kept = new_name(), KeptResponses(store, 3600.0)
        failed, broken = await store.during(begin(kept, name), number, how)
        if not broken:
            assert failed is None
            return
        if failed is None:
            await kept.delete(name, ME)  # the interrupted call was not a write
            continue
        assert isinstance(failed, asyncio.CancelledError | PagodaError)
        assert not [one async for one in kept.unfinished()]
        assert not [log for log in store.logs if await store.length(log)]
        with pytest.raises(PagodaError, match="there is no response"):
            await kept.find(name, ME)
        assert await kept.held_by(ME) == Held(0, 0)


class UnderWay:
    """A store in which appends take longer than other calls, and complete even if the caller is cancelled."""

    def __init__(self, store: Store) -> None:
        self.calls = list[asyncio.Task[object]]()
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        async def later(*args: object, **kwargs: object) -> object:
            await asyncio.sleep(0.02 if name == "append" else 0.0)
            return await getattr(self._store, name)(*args, **kwargs)

        async def call(*args: object, **kwargs: object) -> object:
            self.calls.append(asyncio.create_task(later(*args, **kwargs)))
            return await asyncio.shield(self.calls[-1])

        return call


async def test_what_is_under_way_when_its_caller_leaves_is_taken_back_too(store: Breaking) -> None:
    for number in itertools.count(1):
        under_way = UnderWay(store)
        asked = Breaking(under_way)  # type: ignore[arg-type]
        name, kept = new_name(), KeptResponses(asked, 3600.0)
        failed, broken = await asked.during(begin(kept, name), number, How.CANCELLED)
        await asyncio.gather(*under_way.calls, return_exceptions=True)
        if not broken:
            return
        assert isinstance(failed, asyncio.CancelledError)
        assert not [log for log in store.logs if await store.length(log)]
        assert not [one async for one in kept.unfinished()]


async def test_of_readers_that_end_at_once_any_may_leave(store: Breaking) -> None:
    for number in itertools.count(1):
        name, kept = new_name(), KeptResponses(store, 3600.0)
        tasks = [asyncio.ensure_future(finish(kept, name)) for _ in range(3)]
        store.leave = tasks[0].cancel  # type: ignore[method-assign]
        store.break_at(number, How.CANCELLED)
        await asyncio.gather(*tasks, return_exceptions=True)
        broken = store.broken
        store.mend()
        _, found = await kept.find(name, ME)
        assert (await kept.items(name, found), await kept.response(name, found)) == ([{"id": "a"}], OBJECT)
        await assert_sound(store)
        if not broken:
            return


async def test_one_that_is_told_again_while_it_is_forgotten_is_whole(store: Breaking) -> None:
    name, other = new_name(), KeptResponses(store, 3600.0)
    forgetting = KeptResponses(Interleaved(store, "delete", RESPONSES, lambda: finish(other, name)), 3600.0)
    await finish(forgetting, name)
    await forget(forgetting, name)
    _, found = await other.find(name, ME)
    assert await other.response(name, found) == OBJECT
    await assert_sound(store)


async def test_one_that_goes_while_it_is_read_is_not_read_in_part(store: Breaking) -> None:
    name, other = new_name(), KeptResponses(store, 3600.0)
    await other.finished(name, ME, ITEMS, b"x" * 3 * MAX_PAGE_BYTES)
    _, found = await other.find(name, ME)
    reading = KeptResponses(Interleaved(store, "read", found.object_log(name), lambda: forget(other, name)), 3600.0)
    with pytest.raises(PagodaError) as caught:
        await reading.response(name, found)
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_of_two_gateways_that_end_one_the_second_touches_nothing_of_the_first(store: Breaking) -> None:
    for number in itertools.count(1):
        name, first, second = new_name(), KeptResponses(store, 3600.0), KeptResponses(store, 3600.0)
        await begin(first, name)
        record, found = await first.find(name, ME)
        await first.end(record, found, OBJECT, new_content())
        store.break_at(number, How.KILLED_AFTER)
        with suppress(Conflict, Killed):
            await second.end(record, found, b'{"by":"the second"}', new_content())
        broken = store.broken
        store.mend()
        _, found = await first.find(name, ME)
        assert await first.response(name, found) == OBJECT
        if not broken:
            return


async def test_who_writes_for_too_long_takes_back_what_was_swept(
    store: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "RESPONSE_LOOSE_S", 0.0)
    name, other = new_name(), KeptResponses(store, 3600.0)
    slow = KeptResponses(Interleaved(store, "append", log_of_items(name, content := "c" * 16), other.sweep), 3600.0)
    monkeypatch.setattr("pagoda_gateway.store.responses.new_content", lambda: content)
    with pytest.raises(PagodaError) as caught:
        await finish(slow, name)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert await store.get(RESPONSES, name) is None
    await assert_sound(store)


def log_of_items(name: str, content: str) -> str:
    return log_of(name, "items", content)


async def test_one_that_is_begun_for_too_long_is_given_up(store: Breaking) -> None:
    name, other = new_name(), KeptResponses(store, 3600.0)

    async def bury() -> None:
        await other.bury(name, ME)

    slow = KeptResponses(Interleaved(store, "put", UNFINISHED, bury), 3600.0)
    with pytest.raises(PagodaError) as caught:
        await begin(slow, name)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    await assert_sound(store)


async def test_one_that_was_deleted_is_not_kept_again(store: Breaking) -> None:
    name, kept = new_name(), KeptResponses(store, 3600.0)
    await finish(kept, name)
    await delete(kept, name)
    for reading in (finish(kept, name), delete(kept, name), kept.conversation(name, ME), cancel(kept, name)):
        with pytest.raises(PagodaError) as caught:
            await reading
        assert caught.value.code is ErrorCode.NOT_FOUND
    assert await kept.held_by(ME) == Held(0, 0)


@pytest.mark.parametrize("background", [False, True])
async def test_what_a_version_before_this_kept_is_read_and_deleted(store: Breaking, background: bool) -> None:
    name, kept = new_name(), KeptResponses(store, 3600.0)
    logs = {"items": ITEMS, "object": OBJECT} | ({"events": EVENT} if background else {})
    for log, data in logs.items():
        await store.append(f"response/{name}/{log}", [data])
    value = msgspec.json.encode({"ended": True, "num_bytes": 60, **({"background": True} if background else {})})
    await store.put(RESPONSES, name, value, owner=ME)
    assert await kept.conversation(name, ME) == [{"id": "a"}]
    await finish(kept, name)
    _, found = await kept.find(name, ME)
    assert await kept.response(name, found) == OBJECT
    await forget(kept, name)
    await assert_sound(store)
    assert await kept.held_by(ME) == Held(0, 0)


async def test_what_runs_takes_its_room_before_it_writes(store: Breaking) -> None:
    kept = KeptResponses(store, 3600.0, Held(100, 64_000))
    names = [new_name() for _ in range(2)]
    for name in names:
        await begin(kept, name)
    begun = (await kept.held_by(ME)).num_bytes
    assert await kept.reserve(names[0], ME, 40_000) == 40_000
    assert await kept.reserve(names[0], ME, 1) == 1000, "not every event changes the record"
    assert (await kept.held_by(ME)).num_bytes == begun + 41_000
    for reserved in (
        kept.reserve(names[1], ME, 40_000),
        KeptResponses(store, 1.0, Held(9, 64_000)).finished(new_name(), ME, ITEMS, b"x" * 40_000),
    ):
        with pytest.raises(PagodaError) as caught:
            await reserved
        assert caught.value.code is ErrorCode.RATE_LIMITED
    await end(kept, names[0])
    still = begun - len(JOB) + len(OBJECT)
    assert (await kept.held_by(ME)).num_bytes == still, "what was not written is free again, and what is gone"
    with pytest.raises(Conflict):
        await kept.reserve(names[0], ME, 1)
