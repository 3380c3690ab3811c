"""A response is kept whole, however large it is, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from pagoda_gateway.store.interface import MAX_PART_BYTES, Conflict
from pagoda_gateway.store.response_logs import PAGE, new_content
from pagoda_gateway.store.responses import KeptResponses
from pagoda_gateway.store.room import Held
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

NAME = f"resp_{'0' * 32}"


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    store = SqliteStore(MEMORY)
    yield store
    await store.aclose()


def event(number: int, size: int) -> bytes:
    return b"event: e\ndata: " + b"%d" % number * size + b"\n\n"


async def test_events_of_any_size_are_numbered_one_by_one(store: SqliteStore) -> None:
    kept = KeptResponses(store, 3600.0)
    sizes = [1, 3 * MAX_PART_BYTES, *[MAX_PART_BYTES - 100] * 5, *[1] * PAGE, MAX_PART_BYTES + 1]
    events = [event(i % 10, size) for i, size in enumerate(sizes)]
    await kept.add_events(NAME, events[:4], 0)
    await kept.add_events(NAME, events[4:], 4)
    assert await kept.num_events(NAME) == len(events)
    for start in (0, 1, 2, 6, len(events) - 1):
        assert [one async for one in kept.events(NAME, start)] == events[start:]
    with pytest.raises(Conflict):
        await kept.add_events(NAME, events[:1], 2)


async def test_one_that_is_told_again_is_kept_once_whatever_its_first_gateway_had_written(store: SqliteStore) -> None:
    kept = KeptResponses(store, 3600.0)
    await store.append(f"response/{NAME}/items", [b"[1"])
    for response in (b"{}", b"other"):
        await kept.finished(NAME, "me", b"[]", response)
    _, found = await kept.find(NAME, "me")
    assert (await kept.items(NAME, found), await kept.response(NAME, found)) == ([], b"{}")


async def test_what_is_left_of_one_that_expires_is_not_found(store: SqliteStore) -> None:
    kept = KeptResponses(store, 3600.0)
    await kept.finished(NAME, "me", b"[]", b"{}")
    _, found = await kept.find(NAME, "me")
    for log in found.logs(NAME):
        await store.drop(log)
    for reading in (kept.items(NAME, found), kept.response(NAME, found), kept.conversation(NAME, "me")):
        with pytest.raises(PagodaError) as caught:
            await reading
        assert caught.value.code is ErrorCode.NOT_FOUND


def name_of(number: int) -> str:
    return f"resp_{number:032x}"


async def there(kept: KeptResponses, count: int, owner: str = "me") -> list[int]:
    """The numbers of the responses that are kept."""
    found = []
    for number in range(count):
        with suppress(PagodaError):
            await kept.find(name_of(number), owner)
            found.append(number)
    return found


@pytest.mark.parametrize("most", [Held(4, 10**9), Held(10**6, 410)])
async def test_the_oldest_that_ended_make_room_and_others_stay(store: SqliteStore, most: Held) -> None:
    kept = KeptResponses(store, 3600.0, most)
    await kept.begin(name_of(0), "me", b"[]", b"j" * 98, streamed=False)
    await kept.finished(name_of(1), "other", b"[]", b"r" * 98)
    for number in range(2, 8):
        await kept.finished(name_of(number), "me", b"[]", b"r" * 98)
    assert await there(kept, 8) == [0, 5, 6, 7], "what runs is forgotten by nobody"
    assert await there(kept, 8, "other") == [1]
    assert await kept.held_by("me") == Held(4, 400)


async def test_nothing_is_forgotten_for_what_was_deleted(store: SqliteStore) -> None:
    kept = KeptResponses(store, 3600.0, Held(6, 10**9))
    for number in range(12):
        await kept.finished(name_of(number), "me", b"[]", b"{}")
        if number >= 3:
            await kept.delete(name_of(number), "me")
    assert await there(kept, 12) == [0, 1, 2]


async def test_what_runs_leaves_no_room_to_be_made(store: SqliteStore) -> None:
    kept = KeptResponses(store, 3600.0, Held(2, 1000))
    for number in range(2):
        await kept.begin(name_of(number), "me", b"[]", b"{}", streamed=False)
    with pytest.raises(PagodaError, match="2 responses of 1000 bytes together are kept for a key at most") as caught:
        await kept.finished(name_of(2), "me", b"[]", b"{}")
    assert caught.value.code is ErrorCode.RATE_LIMITED
    with pytest.raises(PagodaError, match="may take 1000 bytes each") as caught:
        await kept.finished(name_of(2), "me", b"[]", b"x" * 1000)
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE


async def test_events_of_one_that_ran_in_the_background_count(store: SqliteStore) -> None:
    kept = KeptResponses(store, 3600.0)
    await kept.begin(NAME, "me", b"[]", b"{}", streamed=True)
    await kept.add_events(NAME, [event(1, 50), event(2, 70)], 0)
    record, begun = await kept.find(NAME, "me")
    await kept.end(record, begun, b"{}", new_content())
    assert await kept.held_by("me") == Held(1, len(event(1, 50)) + len(event(2, 70)) + 4)


@pytest.mark.parametrize("end", ["ended", "deleted"])
async def test_who_is_refused_has_room_as_soon_as_one_has_ended_or_is_gone(store: SqliteStore, end: str) -> None:
    kept = KeptResponses(store, 3600.0, Held(2, 10**6))
    for number in range(2):
        await kept.begin(name_of(number), "me", b"[]", b"{}", streamed=False)
    with pytest.raises(PagodaError) as caught:
        await kept.finished(name_of(2), "me", b"[]", b"{}")
    assert 1.0 <= (caught.value.retry_after_s or 0.0) <= times.TICKETS_FRESH_S
    if end == "deleted":
        await kept.delete(name_of(0), "me")
    else:
        await kept.end(*await kept.find(name_of(0), "me"), b"{}", "content")
    await kept.finished(name_of(2), "me", b"[]", b"{}")
    assert await there(kept, 3) == [1, 2]
