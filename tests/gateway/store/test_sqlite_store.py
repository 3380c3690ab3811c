"""What a file can do to a store, and what other processes can that share it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes import ManualClock

from pagoda_gateway.store import sqlite_store
from pagoda_gateway.store.interface import Full
from pagoda_gateway.store.sqlite_store import FORMAT, MEMORY, SWEPT_AT_ONCE, SqliteStore
from pagoda_proto.errors import ErrorCode, PagodaError

HERE = Path(__file__).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(str(path))
    yield store
    await store.aclose()


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


async def fails(store: SqliteStore) -> str:
    """The reason for a failed call, as logged."""
    with pytest.raises(PagodaError) as caught:
        await store.put("things", "k", b"v")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.retry_after_s > 0
    assert "store.db" not in caught.value.message
    return "; ".join(caught.value.__notes__)


@pytest.mark.e2e
async def test_what_was_acknowledged_survives_kill_9(store: SqliteStore, path: Path) -> None:
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, HERE / "writing_program.py", f"sqlite://{path}", stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        last = (0, 0)
        for _ in range(20):
            index, length = (await process.stdout.readline()).split()
            last = (int(index), int(length))
        process.kill()
        rest, _ = await process.communicate()
        for line in rest.decode().splitlines(keepends=True):
            if line.endswith("\n"):
                last = (int(line.split()[0]), int(line.split()[1]))
        for i in range(last[0] + 1):
            found = await store.get("things", f"k{i}")
            assert found is not None
            assert found.value == b"%d" % i
        parts = await store.read("log")
        assert len(parts) >= last[1]
        assert parts[last[1] - 1] == b"%d" % last[0]


async def test_two_processes_may_share_a_file(store: SqliteStore, path: Path) -> None:
    other = SqliteStore(str(path))
    counts = await asyncio.gather(*(each.append("n", [b"."]) for _ in range(20) for each in (store, other)))
    assert sorted(counts) == list(range(1, 41))
    await other.aclose()


async def test_a_locked_file_is_a_failure_and_none_afterwards(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store.times, "STORE_LOCKED_S", 0.05)
    await store.put("things", "k", b"v")
    await store.aclose()
    store = SqliteStore(str(path))
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    assert "locked" in await fails(store)
    lock.execute("ROLLBACK")
    lock.close()
    assert await store.get("things", "k") is not None
    await store.put("things", "k", b"v")
    await store.aclose()


@pytest.mark.parametrize("place", ["", "a file/store.db"])
async def test_what_cannot_be_a_file_is_a_failure(tmp_path: Path, place: str) -> None:
    write(tmp_path / "a file", b"")
    store = SqliteStore(str(tmp_path / place))
    assert await fails(store)
    await store.aclose()


async def test_a_file_that_became_read_only_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "_open", read_only)
    first = sqlite3.connect(path)
    first.executescript(f"PRAGMA journal_mode=WAL; BEGIN; {sqlite_store._TABLES} PRAGMA user_version={FORMAT}; COMMIT;")
    first.close()
    store = SqliteStore(str(path))
    assert await store.get("things", "k") is None
    assert "readonly" in await fails(store)
    assert await store.get("things", "k") is None
    await store.aclose()


def read_only(path: str, *, scratch: bool) -> sqlite3.Connection:
    """As on a disk that the kernel made read-only: file modes do not restrict root."""
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)


async def test_scratch_is_bounded_and_keeps_what_it_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "MAX_SCRATCH_BYTES", 1_000_000)
    for store in (SqliteStore(MEMORY), SqliteStore(str(path), scratch=True)):
        await store.append("log", [bytes(400_000)])
        with pytest.raises(Full) as caught:
            await store.append("log", [bytes(800_000)])
        assert "full" in "; ".join(caught.value.__notes__)
        assert await store.length("log") == 1
        await store.drop("log")
        await store.append("log", [bytes(800_000)])
        await store.aclose()


@pytest.mark.e2e
async def test_a_full_disk_keeps_what_was_there_and_is_used_again(path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, HERE / "filling_program.py", f"sqlite://{path}", "3000000", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    refused, kept, again = out.decode().splitlines()
    written, code, may_retry, why = refused.split("|")
    assert int(written) > 5
    assert (code, may_retry) == ("unavailable", "True")
    assert "full" in why or "I/O" in why
    assert kept == f"{written}|{min(int(written), 10)}"
    assert int(again) == int(written) + 1


async def test_a_damaged_file_is_a_failure_until_it_is_gone(store: SqliteStore, path: Path) -> None:
    write(path, b"no database" * 1000)
    assert "not a database" in await fails(store)
    remove(path)
    await store.put("things", "k", b"v")


async def test_a_file_of_a_later_version_is_a_failure(store: SqliteStore, path: Path) -> None:
    later = sqlite3.connect(path)
    later.execute(f"PRAGMA user_version = {FORMAT + 1}")
    later.close()
    assert f"format {FORMAT + 1}" in await fails(store)


async def test_nobody_else_may_read_the_file(path: Path) -> None:
    store = SqliteStore(str(path.parent / "new" / "store.db"))
    await store.put("things", "k", b"v")
    for made in [path.parent / "new", *(path.parent / "new").iterdir()]:
        assert not stat.S_IMODE(os.stat(made).st_mode) & 0o077, made
    await store.aclose()


async def test_what_has_expired_leaves_the_file_with_later_writes() -> None:
    clock = ManualClock(1000.0)
    store = SqliteStore(MEMORY, clock)
    for i in range(SWEPT_AT_ONCE):
        await store.put("things", f"k{i}", b"v", expires_at=1001.0)
        await store.append(f"log{i}", [b"p", b"q"])
        await store.keep_until(f"log{i}", 1001.0)
        await store.claim(f"claim{i}", "me", 1.0)
    clock.advance(2.0)
    assert await store.get("things", "k0") is None
    for _ in range(SWEPT_AT_ONCE):
        await store.put("things", "new", b"v")
    connection = store._connection
    assert connection is not None

    def count(table: str) -> int:
        ((found,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
        return int(found)

    tables = ("records", "logs", "parts", "claims")
    counted = await asyncio.get_running_loop().run_in_executor(store._thread, lambda: [count(t) for t in tables])
    assert counted == [1, 0, 0, 0]
    await store.aclose()
