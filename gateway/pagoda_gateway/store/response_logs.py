"""The logs beside the record of a response: each is named by the record, or by an entry in LOOSE.

A writer that writes logs no record names yet, or makes a record stop naming them, adds an entry first and removes it
afterwards. An entry may be left behind by a gateway that was killed, or that does not know the outcome of its last
write; a sweep then drops the entry's logs that the record does not name by then. A writer that finds its entry swept
was too slow, and takes back what it wrote.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from pagoda_gateway.store.interface import (
    ABSENT,
    MAX_APPEND_BYTES,
    MAX_PAGE_RECORDS,
    MAX_PART_BYTES,
    Conflict,
    Full,
    Record,
    Store,
    Unreadable,
    decoded,
    parts_of,
    read_whole,
)
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

LOOSE = "loose_response_logs"
ITEMS, OUTPUT, EVENTS, LARGE, JOB = "items", "object", "events", "large", "job"
PARTS_PER_APPEND = MAX_APPEND_BYTES // MAX_PART_BYTES
PAGE = 100
T = TypeVar("T")


class _Loose(msgspec.Struct, frozen=True):
    """Logs of the response `name` that possibly no record names, `since` this Unix time."""

    name: str
    logs: list[str]
    since: float


class Entry(NamedTuple):
    key: str
    loose: _Loose
    version: int


def not_found(name: str) -> PagodaError:
    return PagodaError(ErrorCode.NOT_FOUND, f"there is no response {name[:64]!a}")


def log_of(name: str, kind: str, content: str = "") -> str:
    """`content`: a name unique to the write, "" if there is only one writer."""
    return f"response/{name}/{kind}" + (f"/{content}" if content else "")


def new_content() -> str:
    return secrets.token_hex(8)


class LooseLogs:
    """`named` returns the logs that the record of a response names now."""

    def __init__(
        self, store: Store, expiry: Callable[[], float], named: Callable[[str], Awaitable[Collection[str]]]
    ) -> None:
        self._store = store
        self._expiry = expiry
        self._named = named

    async def enter(self, name: str, logs: Collection[str]) -> Entry:
        loose = _Loose(name, sorted(logs), time.time())
        return await self._put(secrets.token_hex(16), loose, ABSENT)

    async def enter_going(self, name: str, logs: Collection[str]) -> Entry:
        """Add an entry for logs to be deleted; if there is no room for one, they are deleted without."""
        try:
            return await self.enter(name, logs)
        except Full:
            return Entry("", _Loose(name, sorted(logs), 0.0), ABSENT)

    async def settle(self, entry: Entry) -> None:
        """Drop the logs that the record does not name. Raises Conflict if the entry was swept meanwhile."""
        named = await self._named(entry.loose.name)
        for log in entry.loose.logs:
            if log not in named:
                await self._store.drop(log)
        if entry.version != ABSENT:
            await self._store.delete(LOOSE, entry.key, expect=entry.version)

    async def sweep(self) -> None:
        """Settle entries that other writers have left behind."""
        async for record in records_of(self._store, LOOSE, ""):
            with suppress(Unreadable, Conflict):  # unreadable, or another gateway is settling it
                loose = decoded(record.key, record.value, _Loose)
                if abs(time.time() - loose.since) >= times.RESPONSE_LOOSE_S:
                    await self.settle(await self._swept(record, loose))

    async def _swept(self, record: Record, loose: _Loose) -> Entry:
        """The entry rewritten with a new version, which tells its writer that it was swept."""
        try:
            return await self._put(record.key, loose, record.version)
        except Full:  # settling it makes room
            return Entry(record.key, loose, record.version)

    async def _put(self, key: str, loose: _Loose, expect: int) -> Entry:
        value = msgspec.json.encode(loose)
        version = await self._store.put(LOOSE, key, value, expect=expect, expires_at=self._expiry())
        return Entry(key, loose, version)


class Logs:
    """Reads and writes logs of one store. `expiry` returns when a log that is written now expires."""

    def __init__(self, store: Store, expiry: Callable[[], float]) -> None:
        self._store = store
        self._expiry = expiry

    async def write(self, log: str, data: bytes) -> None:
        parts, expires_at = parts_of(data), self._expiry()
        for i in range(0, len(parts), PARTS_PER_APPEND):
            group = parts[i : i + PARTS_PER_APPEND]
            await self._store.append(log, group, index=i, expires_at=expires_at)

    async def read(self, log: str) -> bytes:
        return await read_whole(self._store, log)

    async def size(self, log: str) -> int:
        """In bytes."""
        size = start = 0
        while parts := await self._store.read(log, start):
            size, start = size + sum(map(len, parts)), start + len(parts)
        return size

    async def add_events(self, name: str, events: Sequence[bytes], index: int) -> None:
        """An event too large for a part goes to a log aside. Raises Conflict unless there are `index` events."""
        parts = [one if len(one) <= MAX_PART_BYTES else await self._laid_aside(name, one) for one in events]
        for group in _groups(parts):
            index = await self._store.append(log_of(name, EVENTS), group, index=index, expires_at=self._expiry())

    async def _laid_aside(self, name: str, event: bytes) -> bytes:
        """The part that stands for it in the log of events; no event begins like that."""
        expires_at, log = self._expiry(), log_of(name, LARGE)
        ends = [await self._store.append(log, [piece], expires_at=expires_at) for piece in parts_of(event)]
        return msgspec.json.encode([end - 1 for end in ends])

    async def events(self, name: str, start: int = 0) -> AsyncIterator[bytes]:
        """The events stored so far, from `start` on. Raises PagodaError NOT_FOUND if one has expired."""
        while parts := await self._store.read(log_of(name, EVENTS), start):
            for part in parts:
                yield await self._whole(name, part)
            start += len(parts)

    async def _whole(self, name: str, part: bytes) -> bytes:
        """The event, from its part."""
        if not part.startswith(b"["):
            return part
        found = [await self._store.read(log_of(name, LARGE), at) for at in decoded(name, part, list[int])]
        if not all(found):
            raise not_found(name)
        return b"".join(parts[0] for parts in found)


async def records_of(store: Store, collection: str, owner: str) -> AsyncIterator[Record]:
    """All records of an owner, the oldest first."""
    after = None
    while True:
        page = await store.page(collection, owner, limit=MAX_PAGE_RECORDS, after=after, newest_first=False)
        for record in page.records:
            after = record.position
            yield record
        if not page.more:
            return


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Its result. If the caller is cancelled meanwhile, CancelledError is raised once the work is done."""
    task, left = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            left = error
    if left is not None:
        with suppress(PagodaError, Conflict):
            task.result()
        raise left
    return task.result()


def _groups(parts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Groups of as many parts as fit in one append."""
    group, room = list[bytes](), MAX_APPEND_BYTES
    for part in parts:
        if group and (len(group) == PAGE or len(part) > room):
            yield group
            group, room = [], MAX_APPEND_BYTES
        group.append(part)
        room -= len(part)
    if group:
        yield group
