"""Changes to batches are serialised, and the number of open batches is bounded so that they can be searched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagoda_gateway.batches import batch as states
from pagoda_gateway.batches import batches as module
from pagoda_gateway.batches.batch import Batch, Counts, Status, new_batch
from pagoda_gateway.batches.batches import OPEN, Batches, claim_of
from pagoda_gateway.store.interface import unavailable
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError


@pytest.fixture
async def batches() -> AsyncIterator[Batches]:
    store = SqliteStore(MEMORY, lambda: 1000.0)
    yield Batches(store, lambda: 1000.0)
    await store.aclose()


async def added(batches: Batches, owner: str = "me") -> Batch:
    batch = new_batch("/v1/completions", "file-1", None, 3600, 1000.0)
    await batches.add(owner, batch)
    return batch


async def test_of_changes_at_once_none_is_lost(batches: Batches) -> None:
    batch = await added(batches)

    def one_more(batch: Batch) -> Batch:
        return states.counted(batch, Counts(10, batch.counts.completed + 1, 0))

    await asyncio.gather(*(batches.change("me", batch.id, one_more) for _ in range(10)))
    assert (await batches.find("me", batch.id)).counts == Counts(10, 10, 0)


async def test_what_is_open_tells_owner_and_model(batches: Batches) -> None:
    one, two = await added(batches, "me"), await added(batches, "you")
    await batches.change("you", two.id, lambda batch: states.begun(batch, "m", 3, 1001.0))
    assert [(work.batch_id, work.owner, work.model) for work in await batches.open()] == [
        (one.id, "me", ""),
        (two.id, "you", "m"),
    ]
    await batches.close(two.id)
    assert [work.batch_id for work in await batches.open()] == [one.id]


async def test_what_has_ended_is_kept_for_a_while(batches: Batches) -> None:
    batch = await added(batches)
    await batches.change("me", batch.id, lambda batch: states.refused(batch, [], 1001.0))
    record = await batches.store.get("batches", batch.id)
    assert record is not None
    assert record.expires_at == 1000.0 + times.KEPT_S
    assert (await batches.find("me", batch.id)).status is Status.FAILED


async def test_open_batches_are_bounded(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 3)
    monkeypatch.setattr(module, "MAX_OPEN_OF_ONE", 2)
    first, _ = await added(batches), await added(batches)
    with pytest.raises(PagodaError, match="2 batches of yours") as caught:
        await added(batches)
    assert caught.value.code is ErrorCode.RATE_LIMITED
    await added(batches, "you")
    with pytest.raises(PagodaError, match="3 batches are open") as caught:
        await added(batches, "somebody")
    assert caught.value.code is ErrorCode.OVERLOADED
    await batches.close(first.id)
    await added(batches)


async def test_what_cannot_be_read_is_bounded_too_and_hides_nothing(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 5)
    monkeypatch.setattr(module, "MAX_PAGE_RECORDS", 2)
    for number in range(3):
        await batches.store.put(OPEN, f"old{number}", b"of another version")
    ours = [(await added(batches)).id for _ in range(2)]
    assert [work.batch_id for work in await batches.open()] == ours
    with pytest.raises(PagodaError, match="5 batches are open"):
        await added(batches)


async def test_a_batch_is_nobody_elses(batches: Batches) -> None:
    batch = await added(batches)
    for call in (
        batches.find("you", batch.id),
        batches.cancel("you", batch.id),
        batches.page("you", limit=1, after=batch.id),
    ):
        with pytest.raises(PagodaError) as caught:
            await call
        assert caught.value.code is ErrorCode.NOT_FOUND
    assert not batches.changed.is_set() or (await batches.find("me", batch.id)).status is Status.VALIDATING


async def test_a_batch_that_could_not_be_kept_is_not_in_the_list_for_ever(batches: Batches) -> None:
    """Its gateway died, or the store failed, between the two writes: a reader finds nothing, or the work."""

    class Failing(SqliteStore):
        async def put(self, collection: str, key: str, value: bytes, **options: Any) -> int:
            if self.puts:
                raise unavailable("as the test wants it", 0.0)
            self.puts += 1
            return await super().put(collection, key, value, **options)

        puts = 0

    batches.store = Failing(MEMORY)
    with pytest.raises(PagodaError):
        await added(batches)
    assert not (await batches.page("me", limit=10, after=None)).batches
    (work,) = await batches.open()
    assert not await batches.store.claim(claim_of(work.batch_id), "somebody", 1.0)
    await batches.store.aclose()
