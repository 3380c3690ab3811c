"""What is kept of a response is there whole, however large it is, or is not there at all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pagoda_gateway.store.interface import MAX_PART_BYTES, Conflict
from pagoda_gateway.store.responses import PAGE, KeptResponses
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
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
    assert (await kept.items(NAME), await kept.response(NAME)) == ([], b"{}")


async def test_what_is_left_of_one_that_expires_is_not_found(store: SqliteStore) -> None:
    kept = KeptResponses(store, 3600.0)
    await kept.finished(NAME, "me", b"[]", b"{}")
    for log in ("items", "object"):
        await store.drop(f"response/{NAME}/{log}")
    for reading in (kept.items(NAME), kept.response(NAME), kept.conversation(NAME, "me")):
        with pytest.raises(PagodaError) as caught:
            await reading
        assert caught.value.code is ErrorCode.NOT_FOUND
