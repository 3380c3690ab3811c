"""SQLite, in a thread of its own: one connection, one call at a time, one transaction per call.

A write is on disk before its call returns. Other processes may use the same file. Any SQLite error (a locked, full,
damaged or read-only file) closes the connection, and the next call reopens it.

A store that need not last is scratch: in memory, or in a file that survives its process but not a power failure. Its
size is bounded, because it may lie on a small file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pagoda_gateway.store import interface
from pagoda_gateway.store.interface import MAX_PAGE_BYTES, Conflict, Full, Page, Record, unavailable
from pagoda_proto import times

MEMORY = ":memory:"
FORMAT = 1  # version of the tables, stored as SQLite's user_version
SWEPT_AT_ONCE = 16
MAX_SCRATCH_BYTES = 512 * 1024 * 1024
MAX_JOURNAL_BYTES = 64 * 1024 * 1024
_TABLES = """
CREATE TABLE IF NOT EXISTS versions (last INTEGER NOT NULL);
INSERT INTO versions SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM versions);
CREATE TABLE IF NOT EXISTS records (
    collection TEXT NOT NULL, key TEXT NOT NULL, owner TEXT NOT NULL, value BLOB NOT NULL,
    version INTEGER NOT NULL, position INTEGER NOT NULL, expires_at REAL, PRIMARY KEY (collection, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_in_order ON records (collection, owner, position);
CREATE INDEX IF NOT EXISTS records_by_expiry ON records (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS logs (log TEXT PRIMARY KEY, num_parts INTEGER NOT NULL, expires_at REAL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS logs_by_expiry ON logs (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS parts (id INTEGER PRIMARY KEY, log TEXT NOT NULL, at INTEGER NOT NULL, part BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS parts_in_order ON parts (log, at);
CREATE TABLE IF NOT EXISTS claims (name TEXT PRIMARY KEY, holder TEXT NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS claims_by_expiry ON claims (until);
"""
_ALIVE = "(expires_at IS NULL OR expires_at > :now)"
_FIELDS = "key, owner, value, version, position, expires_at"

T = TypeVar("T")


class SqliteStore:
    """Implements `Store`. `path` is a file, created if missing, or MEMORY, which is scratch.

    `clock` returns Unix seconds.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time, *, scratch: bool = False) -> None:
        self._path = path
        self._scratch = scratch or path == MEMORY
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def _do(self, work: Callable[[sqlite3.Connection, float], T], *, write: bool = True) -> T:
        def in_thread() -> T:
            try:
                with self._transaction(write) as connection:
                    return work(connection, self._clock())
            except (sqlite3.Error, OSError) as error:
                self._close()
                why = f"{type(error).__name__}: {error}"
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise Full(why) from error
                raise unavailable(why, times.STORE_REST_S) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, in_thread)

    @contextlib.contextmanager
    def _transaction(self, write: bool) -> Iterator[sqlite3.Connection]:
        self._connection = connection = self._connection or _open(self._path, scratch=self._scratch)
        connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.commit()

    def _close(self) -> None:
        """Keep a store in memory open: closing it would lose its data."""
        if self._connection is not None and self._path != MEMORY:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Does not wait for a call that hangs. Safe to call twice."""
        with contextlib.suppress(RuntimeError):  # the thread is already shutting down
            self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Records

    async def get(self, collection: str, key: str) -> Record | None:
        interface.check_collection(collection)

        def work(connection: sqlite3.Connection, now: float) -> Record | None:
            return _record(connection, collection, key, now)

        return await self._do(work, write=False)

    async def put(
        self,
        collection: str,
        key: str,
        value: bytes,
        *,
        owner: str = "",
        expect: int | None = None,
        expires_at: float | None = None,
    ) -> int:
        interface.check_collection(collection)
        interface.check_names(key, owner)
        interface.check_value(value)

        def work(connection: sqlite3.Connection, now: float) -> int:
            _sweep(connection, now)
            known = _expected(connection, collection, key, expect, now)
            ((version,),) = connection.execute("UPDATE versions SET last = last + 1 RETURNING last").fetchall()
            position = version if known is None else known.position
            row = (collection, key, owner, value, version, position, expires_at)
            connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            return int(version)

        return await self._do(work)

    async def delete(self, collection: str, key: str, *, expect: int | None = None) -> bool:
        interface.check_collection(collection)

        def work(connection: sqlite3.Connection, now: float) -> bool:
            known = _expected(connection, collection, key, expect, now)
            connection.execute("DELETE FROM records WHERE collection = ? AND key = ?", (collection, key))
            return known is not None

        return await self._do(work)

    async def page(
        self, collection: str, owner: str, *, limit: int, after: int | None = None, newest_first: bool = True
    ) -> Page:
        interface.check_collection(collection)
        interface.check_limit(limit)
        beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
        reached = "" if after is None else f"AND position {beyond} :after "
        query = (
            f"SELECT {_FIELDS} FROM records WHERE collection = :collection AND owner = :owner {reached}"
            f"AND {_ALIVE} ORDER BY position {order} LIMIT :limit"
        )
        given = {"collection": collection, "owner": owner, "after": after, "limit": limit + 1}

        def work(connection: sqlite3.Connection, now: float) -> Page:
            rows = connection.execute(query, given | {"now": now})
            records, more = _page((Record(*row) for row in rows), lambda record: len(record.value))
            return Page(records[:limit], more or len(records) > limit)

        return await self._do(work, write=False)

    # Logs

    async def append(
        self, log: str, parts: Sequence[bytes], *, index: int | None = None, expires_at: float | None = None
    ) -> int:
        interface.check_names(log)
        interface.check_parts(parts)

        def work(connection: sqlite3.Connection, now: float) -> int:
            _sweep(connection, now)
            length = _length(connection, log, now)
            if index is not None and index != length:
                raise Conflict
            if not length:
                _forget(connection, log)  # parts of an expired log that is not swept yet
            rows = ((log, length + i, part) for i, part in enumerate(parts))
            connection.executemany("INSERT INTO parts (log, at, part) VALUES (?, ?, ?)", rows)
            row = (log, length + len(parts), expires_at)
            connection.execute(
                "INSERT INTO logs VALUES (?, ?, ?) ON CONFLICT (log) DO UPDATE SET num_parts = excluded.num_parts,"
                " expires_at = coalesce(excluded.expires_at, expires_at)",
                row,
            )
            return length + len(parts)

        return await self._do(work)

    async def read(self, log: str, start: int = 0) -> list[bytes]:
        def work(connection: sqlite3.Connection, now: float) -> list[bytes]:
            if start >= _length(connection, log, now):
                return []
            rows = connection.execute("SELECT part FROM parts WHERE log = ? AND at >= ? ORDER BY at", (log, start))
            return _page((row[0] for row in rows), len)[0]

        return await self._do(work, write=False)

    async def length(self, log: str) -> int:
        return await self._do(lambda connection, now: _length(connection, log, now), write=False)

    async def keep_until(self, log: str, expires_at: float | None) -> None:
        def work(connection: sqlite3.Connection, now: float) -> None:
            given = {"log": log, "expires_at": expires_at, "now": now}
            connection.execute(f"UPDATE logs SET expires_at = :expires_at WHERE log = :log AND {_ALIVE}", given)

        await self._do(work)

    async def drop(self, log: str) -> None:
        await self._do(lambda connection, _: _forget(connection, log))

    # Claims

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        interface.check_names(name, holder)
        query = (
            "INSERT INTO claims VALUES (:name, :holder, :until) ON CONFLICT (name) DO UPDATE SET"
            " holder = excluded.holder, until = excluded.until WHERE holder = :holder OR until <= :now RETURNING 1"
        )

        def work(connection: sqlite3.Connection, now: float) -> bool:
            given = {"name": name, "holder": holder, "until": now + lease_s, "now": now}
            return bool(connection.execute(query, given).fetchall())

        return await self._do(work)

    async def release(self, name: str, holder: str) -> None:
        def work(connection: sqlite3.Connection, now: float) -> None:
            connection.execute("DELETE FROM claims WHERE name = ? AND holder = ?", (name, holder))

        await self._do(work)


def _open(path: str, *, scratch: bool) -> sqlite3.Connection:
    if path != MEMORY:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite creates its other files with the same mode
    connection = sqlite3.connect(path, timeout=times.STORE_LOCKED_S, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'NORMAL' if scratch else 'FULL'}")
        if scratch:
            ((page_bytes,),) = connection.execute("PRAGMA page_size").fetchall()
            connection.execute(f"PRAGMA max_page_count = {MAX_SCRATCH_BYTES // page_bytes}")
        connection.execute(f"PRAGMA journal_size_limit = {MAX_JOURNAL_BYTES}")
        ((found,),) = connection.execute("PRAGMA user_version").fetchall()
        if found > FORMAT:
            raise sqlite3.DatabaseError(f"the file is of format {found}; this version knows {FORMAT}")
        if found < FORMAT:
            connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _record(connection: sqlite3.Connection, collection: str, key: str, now: float) -> Record | None:
    query = f"SELECT {_FIELDS} FROM records WHERE collection = :collection AND key = :key AND {_ALIVE}"
    rows = connection.execute(query, {"collection": collection, "key": key, "now": now}).fetchall()
    return Record(*rows[0]) if rows else None


def _expected(
    connection: sqlite3.Connection, collection: str, key: str, expect: int | None, now: float
) -> Record | None:
    """The current record. Raises Conflict unless it has the expected version."""
    known = _record(connection, collection, key, now)
    if expect is not None and expect != (interface.ABSENT if known is None else known.version):
        raise Conflict
    return known


def _page(items: Iterator[T], size: Callable[[T], int]) -> tuple[list[T], bool]:
    """The items that fit on a page, and whether more remain."""
    page: list[T] = []
    room = MAX_PAGE_BYTES
    for item in items:
        room -= size(item)
        if page and room < 0:
            return page, True
        page.append(item)
    return page, False


def _length(connection: sqlite3.Connection, log: str, now: float) -> int:
    query = f"SELECT num_parts FROM logs WHERE log = :log AND {_ALIVE}"
    rows: list[tuple[Any, ...]] = connection.execute(query, {"log": log, "now": now}).fetchall()
    return int(rows[0][0]) if rows else 0


def _forget(connection: sqlite3.Connection, log: str) -> None:
    connection.execute("DELETE FROM parts WHERE log = ?", (log,))
    connection.execute("DELETE FROM logs WHERE log = ?", (log,))


def _sweep(connection: sqlite3.Connection, now: float) -> None:
    """Called by writes: each deletes a few expired entries, so no periodic sweep is needed."""
    few = f"SELECT name FROM claims WHERE until <= ? LIMIT {SWEPT_AT_ONCE}"
    connection.execute(f"DELETE FROM claims WHERE name IN ({few})", (now,))
    few = f"SELECT collection, key FROM records WHERE expires_at <= ? LIMIT {SWEPT_AT_ONCE}"
    connection.execute(f"DELETE FROM records WHERE (collection, key) IN ({few})", (now,))
    for (log,) in connection.execute("SELECT log FROM logs WHERE expires_at <= ? LIMIT 1", (now,)).fetchall():
        _forget(connection, log)
