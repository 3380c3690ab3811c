"""A line's result is in the log once, whichever gateway wrote it and however often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from pagoda_gateway.batches.batch import Counts
from pagoda_gateway.batches.results import MAX_ANSWER_BYTES, Lost, Result, Results, answered, given_up, refused
from pagoda_gateway.store.interface import unavailable
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_proto.errors import PagodaError


class Flaky(SqliteStore):
    """Writes, but reports a failure as often as it is told."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.failures = 0
        self.appends = 0

    async def append(
        self, log: str, parts: Sequence[bytes], *, index: int | None = None, expires_at: float | None = None
    ) -> int:
        length = await super().append(log, parts, index=index, expires_at=expires_at)
        self.appends += 1
        if self.failures:
            self.failures -= 1
            raise unavailable("it was late", 0.0)
        return length


@pytest.fixture
async def store() -> AsyncIterator[Flaky]:
    store = Flaky()
    yield store
    await store.aclose()


def result(line: int, text: str = "x") -> Result:
    return answered(line, f"id{line}", "req", msgspec.json.encode(text))


async def lines_in(store: Flaky) -> list[int]:
    return [result.line async for result in Results(store, "log").all()]


async def test_what_was_written_is_known_and_found_again(store: Flaky) -> None:
    results = Results(store, "log")
    await results.write([result(1), given_up(2, "id2", "batch_expired", "late")])
    await results.write([refused(4, "id4", "req", 400, {"error": {}})])
    for view in (results, Results(store, "log")):
        await view.load()
        assert [view.has(line) for line in range(1, 5)] == [True, True, False, True]
        assert view.counts(9) == Counts(9, 1, 2)
    written = [msgspec.json.decode(bytes(each.written)) async for each in results.all()]
    assert [each["custom_id"] for each in written] == ["id1", "id2", "id4"]
    assert written[0]["response"] == {"status_code": 200, "request_id": "req", "body": "x"}
    assert written[0]["error"] is None
    assert written[1]["response"] is None
    assert written[1]["error"] == {"code": "batch_expired", "message": "late"}
    assert written[2]["response"]["status_code"] == 400


async def test_two_writers_write_every_line_once(store: Flaky) -> None:
    one, other = Results(store, "log"), Results(store, "log")
    await one.load()
    await other.load()
    writes = [view.write([result(line, str(view is one))]) for line in range(30) for view in (one, other)]
    await asyncio.gather(*writes)
    assert sorted(await lines_in(store)) == list(range(30))
    assert one.counts(30) == other.counts(30) == Counts(30, 30, 0)


async def test_what_is_written_at_once_is_written_together(store: Flaky) -> None:
    results = Results(store, "log")
    await asyncio.gather(*(results.write([result(line)]) for line in range(20)))
    assert sorted(await lines_in(store)) == list(range(20))
    assert store.appends <= 3


async def test_a_write_that_failed_and_was_done_is_not_done_again(store: Flaky) -> None:
    results = Results(store, "log")
    store.failures = 2
    for line in (1, 2):
        with pytest.raises(PagodaError):
            await results.write([result(line)])
    await results.write([result(1), result(2), result(3)])
    assert sorted(await lines_in(store)) == [1, 2, 3]


async def test_a_writer_that_was_cut_off_loses_nothing(store: Flaky) -> None:
    results = Results(store, "log")
    writing = asyncio.create_task(results.write([result(1)]))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await results.write([result(1), result(2)])
    assert sorted(await lines_in(store)) == [1, 2]


async def test_the_largest_answers_fit(store: Flaky) -> None:
    results = Results(store, "log")
    large = "x" * (MAX_ANSWER_BYTES - 2)
    await results.write([answered(i, "c" * 512, "req", msgspec.json.encode(large)) for i in range(3)])
    assert await lines_in(store) == [0, 1, 2]


async def test_who_comes_after_the_end_is_told_so(store: Flaky) -> None:
    late = Results(store, "log")
    await late.write([result(1)])
    await store.drop("log")
    with pytest.raises(Lost):
        await late.write([result(2)])
