"""Transcripts are written in the background, only the last ones of each owner, and shown to nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.gateway.keys.flaky_store import FlakyStore

from pagoda_gateway.store.interface import MAX_APPEND_BYTES
from pagoda_gateway.store.transcripts import MAX_WAITING_BYTES, Transcripts
from pagoda_proto.errors import PagodaError


@pytest.fixture
async def store() -> AsyncIterator[FlakyStore]:
    store = FlakyStore()
    yield store
    await store.aclose()


async def test_what_is_kept_is_found_at_once_and_by_other_gateways_once_it_is_written(store: FlakyStore) -> None:
    here, there = Transcripts(store, 10), Transcripts(store, 10)
    here.keep("me", "id", b"x" * 3_000_000)
    assert await here.find("me", "id") == b"x" * 3_000_000
    assert await there.find("me", "id") is None
    await here.flush()
    for each in (here, there):
        assert await each.find("me", "id") == b"x" * 3_000_000
        assert await each.find("you", "id") is None
    here.keep("you", "id", b"yours")
    here.keep("me", "id", b"again")
    await here.flush()
    assert [await there.find(owner, "id") for owner in ("me", "you")] == [b"again", b"yours"]


@pytest.mark.parametrize("most", [1, 5, 30])
async def test_of_each_owner_the_last_ones_stay(store: FlakyStore, most: int) -> None:
    transcripts = Transcripts(store, most)
    for number in range(3 * most):
        for owner in ("a", "b"):
            transcripts.keep(owner, f"{number}", b"{}")
        await transcripts.flush()
    found = [number for number in range(3 * most) if await transcripts.find("a", f"{number}")]
    assert found == list(range(3 * most - len(found), 3 * most))
    assert max(1, most - 1 - most // 10) <= len(found) <= most
    again = Transcripts(store, most)  # a new instance counts what is stored
    again.keep("a", "new", b"{}")
    await again.flush()
    assert len([n for n in range(3 * most) if await again.find("a", f"{n}")]) < most


async def test_a_store_that_is_gone_is_waited_for_and_what_is_too_much_is_not_kept(store: FlakyStore) -> None:
    transcripts = Transcripts(store, 100)
    store.gone = True
    count = MAX_WAITING_BYTES // MAX_APPEND_BYTES
    for number in range(count + 1):
        transcripts.keep("a", f"{number}", b"x" * MAX_APPEND_BYTES)
    transcripts.keep("a", "large", b"x" * (MAX_APPEND_BYTES + 1))
    with pytest.raises(PagodaError):
        await transcripts.flush()
    store.gone = False
    await transcripts.flush()
    found = [await transcripts.find("a", f"{number}") is not None for number in range(count + 1)]
    assert found == [True] * count + [False]
    assert await transcripts.find("a", "large") is None


async def test_it_writes_by_itself_and_what_is_left_at_the_end(store: FlakyStore) -> None:
    transcripts = Transcripts(store, 10)
    transcripts.start()
    transcripts.keep("a", "1", b"one")
    await transcripts.aclose()
    assert await Transcripts(store, 10).find("a", "1") == b"one"
