"""A tenant's files are whole or absent, bounded in total, and gone when deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.fakes import ManualClock

from pagoda_gateway.batches.files import BATCH, BATCH_OUTPUT, FILES, UPLOAD_KEPT_S, FileInfo, FileLimits, Files
from pagoda_gateway.store.interface import MAX_PART_BYTES
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_proto.errors import ErrorCode, PagodaError

LIMITS = FileLimits(max_bytes=3 * MAX_PART_BYTES, max_bytes_together=6 * MAX_PART_BYTES)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000.0)


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(MEMORY, clock)
    yield store
    await store.aclose()


@pytest.fixture
def files(store: SqliteStore, clock: ManualClock) -> Files:
    return Files(store, LIMITS, clock)


async def upload(files: Files, content: bytes = b"hello", owner: str = "me", kept_s: int | None = None) -> FileInfo:
    uploading = await files.begin(owner, len(content))
    await uploading.write(content)
    return await uploading.finish("a.jsonl", BATCH, kept_s)


async def content_of(files: Files, info: FileInfo) -> bytes:
    return b"".join([data async for data in files.content(info)])


async def ids(files: Files, owner: str = "me") -> list[str]:
    page = await files.page(owner, limit=10, after=None, newest_first=False, purpose=None)
    return [info.id for info in page.files]


async def missing(files: Files, owner: str, file_id: str) -> bool:
    with pytest.raises(PagodaError) as caught:
        await files.find(owner, file_id)
    return caught.value.code is ErrorCode.NOT_FOUND


async def test_a_file_is_there_when_it_is_whole(files: Files) -> None:
    uploading = await files.begin("me", None)
    pieces = [b"a" * 700_000, b"b" * 700_000, b"c" * 700_000]
    for piece in pieces:
        await uploading.write(piece)
        assert await ids(files) == []
    info = await uploading.finish("a.jsonl", BATCH, 3600)
    assert await ids(files) == [info.id]
    assert await files.find("me", info.id) == info
    assert (info.bytes, info.filename, info.expires_at) == (2_100_000, "a.jsonl", 1_003_600)
    assert await content_of(files, info) == b"".join(pieces)


async def test_a_file_is_nobody_elses(files: Files) -> None:
    info = await upload(files)
    assert await missing(files, "you", info.id)
    assert await ids(files, "you") == []
    with pytest.raises(PagodaError):
        await files.delete("you", info.id)
    with pytest.raises(PagodaError):
        await files.page("you", limit=1, after=info.id, newest_first=True, purpose=None)
    assert await files.find("me", info.id) == info


async def test_a_deleted_file_leaves_nothing(files: Files, store: SqliteStore) -> None:
    info = await upload(files)
    await files.delete("me", info.id)
    assert await missing(files, "me", info.id)
    assert await store.length(info.log) == 0
    with pytest.raises(PagodaError):
        await content_of(files, info)


async def test_a_file_vanishes_when_it_was_said_to(files: Files, clock: ManualClock, store: SqliteStore) -> None:
    info, kept = await upload(files, kept_s=3600), await upload(files)
    clock.advance(3600)
    assert await missing(files, "me", info.id)
    assert await ids(files) == [kept.id]
    assert await store.length(info.log) == 0


async def test_a_file_has_no_more_bytes_than_it_may(files: Files) -> None:
    for said in (10, None):
        uploading = await files.begin("me", said)
        with pytest.raises(PagodaError) as caught:
            await uploading.write(bytes((said or LIMITS.max_bytes) + 1))
        assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE
        await uploading.discard()
    assert (await upload(files, bytes(LIMITS.max_bytes))).bytes == LIMITS.max_bytes


async def test_room_is_taken_before_it_is_filled(files: Files) -> None:
    first, second = await files.begin("me", None), await files.begin("me", None)
    with pytest.raises(PagodaError, match="delete some") as caught:
        await files.begin("me", 1)
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE
    await files.begin("you", 1)
    await first.discard()
    await second.write(b"x")
    await second.finish("a", BATCH, None)
    await files.begin("me", 5 * MAX_PART_BYTES - 1)


async def test_an_upload_whose_process_died_is_forgotten(files: Files, clock: ManualClock, store: SqliteStore) -> None:
    uploading = await files.begin("me", None)
    await uploading.write(bytes(2 * MAX_PART_BYTES))
    clock.advance(UPLOAD_KEPT_S)
    assert not (await store.page(FILES, "me", limit=1)).records
    assert await store.length(uploading._info.log) == 0


async def test_files_are_listed_page_by_page_and_by_purpose(files: Files) -> None:
    infos = []
    for i in range(5):
        uploading = await files.begin("me", 1)
        await uploading.write(b"x")
        infos.append(await uploading.finish(f"{i}", BATCH if i % 2 else BATCH_OUTPUT, None))
        await files.begin("me", 1)  # a file that is still being uploaded is not visible
    page = await files.page("me", limit=2, after=None, newest_first=True, purpose=None)
    assert (page.files, page.more) == ([infos[4], infos[3]], True)
    page = await files.page("me", limit=3, after=infos[3].id, newest_first=True, purpose=None)
    assert (page.files, page.more) == ([infos[2], infos[1], infos[0]], False)
    page = await files.page("me", limit=1, after=None, newest_first=False, purpose=BATCH)
    assert (page.files, page.more) == ([infos[1]], True)
    page = await files.page("me", limit=2, after=None, newest_first=False, purpose=BATCH)
    assert (page.files, page.more) == ([infos[1], infos[3]], False)
