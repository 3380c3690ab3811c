"""Responses that are kept: what was asked and answered, for whoever asks again or goes on from there.

A response is a record, and logs beside it of what may be large. The record is written last and deleted first, so what
it speaks of is there. One that runs in the background is kept from its beginning: its job is there, so any gateway can
run it, and its events as far as they were told. `UNFINISHED` lists those for gateways that look for work.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pagoda_gateway.store.interface import (
    ABSENT,
    MAX_APPEND_BYTES,
    MAX_PAGE_RECORDS,
    MAX_PART_BYTES,
    Conflict,
    Record,
    Store,
    Unreadable,
    decoded,
    parts_of,
)
from pagoda_gateway.store.room import NOTHING, Held, Room
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

RESPONSES = "responses"
UNFINISHED = "unfinished_responses"
ITEMS, OUTPUT, EVENTS, LARGE, JOB = "items", "object", "events", "large", "job"
LOGS = (ITEMS, OUTPUT, EVENTS, LARGE, JOB)
PARTS_PER_APPEND = MAX_APPEND_BYTES // MAX_PART_BYTES
PAGE = 100
ROOMY = Held(2**31, 2**50)
_NAME = re.compile(r"resp_[0-9a-f]{32}")


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a record. `ended`: its object is there; `cancelled`: somebody wants it to end. `num_bytes`: what
    lies beside it, as far as that was known when it was written."""

    background: bool = False
    streamed: bool = False
    ended: bool = False
    cancelled: bool = False
    num_bytes: int = 0


class _Headed(msgspec.Struct, frozen=True):
    """Of a job, what is told of it."""

    head: dict[str, Any]


class _Answered(msgspec.Struct, frozen=True):
    """Of a response, what its conversation goes on with."""

    output: list[dict[str, Any]]


class KeptResponses:
    """Of one store, whose errors it raises; NOT_FOUND for a response that `owner` has not."""

    what = "responses"

    def __init__(self, store: Store, keep_s: float, most: Held = ROOMY) -> None:
        self._store = store
        self._keep_s = keep_s
        self._room = Room(self, *most)

    async def find(self, name: str, owner: str) -> tuple[Record, Kept]:
        record = await self._store.get(RESPONSES, name) if _NAME.fullmatch(name) else None
        if record is None or record.owner != owner:
            raise not_found(name)
        return record, decoded(name, record.value, Kept)

    async def finished(self, name: str, owner: str, items: bytes, response: bytes) -> None:
        """Keep one that has ended, unless it is kept. One that is told again may find what a gateway had written when
        it died. Conflict says that somebody else is at it; RATE_LIMITED and REQUEST_TOO_LARGE, that there is no room.
        """
        if await self._store.get(RESPONSES, name) is not None:
            return
        await self._room.take(owner, len(items) + len(response))
        try:
            await self._write_ended(name, owner, items, response)
        except Conflict:
            if await self._store.get(RESPONSES, name) is not None:
                return
            for log in (ITEMS, OUTPUT):
                await self._store.drop(_log(name, log))
            await self._write_ended(name, owner, items, response)

    async def _write_ended(self, name: str, owner: str, items: bytes, response: bytes) -> None:
        await self._write(name, ITEMS, items)
        await self._write(name, OUTPUT, response)
        await self._put(name, owner, Kept(ended=True, num_bytes=len(items) + len(response)), ABSENT)

    async def begin(self, name: str, owner: str, items: bytes, job: bytes, *, streamed: bool) -> int:
        """Keep one that is to run in the background; the version of its record. Raises PagodaError as `finished`."""
        await self._room.take(owner, len(items) + len(job))
        await self._write(name, ITEMS, items)
        await self._write(name, JOB, job)
        kept = Kept(background=True, streamed=streamed, num_bytes=len(items) + len(job))
        version = await self._put(name, owner, kept, ABSENT)
        await self._store.put(UNFINISHED, name, owner.encode(), expires_at=self._expiry())
        return version

    async def end(self, record: Record, kept: Kept, response: bytes) -> None:
        """Raises Conflict when the record is not that one any more."""
        await self._store.drop(_log(record.key, OUTPUT))
        await self._write(record.key, OUTPUT, response)
        told = await self._size(record.key, EVENTS) + await self._size(record.key, LARGE)
        ended = msgspec.structs.replace(kept, ended=True, num_bytes=kept.num_bytes + len(response) + told)
        await self._put(record.key, record.owner, ended, record.version)
        await self.close(record.key)

    async def close(self, name: str) -> None:
        """Nothing is left to do for one that has ended."""
        await self._store.drop(_log(name, JOB))
        await self._store.delete(UNFINISHED, name)

    async def cancel(self, name: str, owner: str) -> None:
        """Have it ended by whoever runs it. Nothing happens to one that has ended."""
        while True:
            record, kept = await self.find(name, owner)
            if kept.ended or kept.cancelled:
                return
            try:
                await self._put(name, owner, msgspec.structs.replace(kept, cancelled=True), record.version)
            except Conflict:
                continue
            return

    async def delete(self, name: str, owner: str) -> None:
        await self.find(name, owner)
        await self._store.delete(RESPONSES, name)
        await self.drop(name)

    async def drop(self, name: str) -> None:
        """What may be left of one whose record is gone."""
        for log in LOGS:
            await self._store.drop(_log(name, log))
        await self._store.delete(UNFINISHED, name)

    async def items(self, name: str) -> list[dict[str, Any]]:
        return decoded(name, await self._there(name, ITEMS), list[dict[str, Any]])

    async def response(self, name: str) -> bytes:
        """The object of one that has ended."""
        return await self._there(name, OUTPUT)

    async def begun(self, name: str, kept: Kept) -> dict[str, Any] | None:
        """The object of one that nobody runs here: what its job says of it. None where it has none any more, as it has
        ended meanwhile."""
        if not (data := await self.job(name)):
            return None
        status = "cancelled" if kept.cancelled else "in_progress"
        head = decoded(name, data, _Headed).head
        return {**head, "status": status, "output": [], "usage": None}

    async def conversation(self, name: str, owner: str) -> list[dict[str, Any]]:
        """What it was asked and what it answered, as items."""
        _, kept = await self.find(name, owner)
        if not kept.ended:
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, f"the response {name[:64]!a} has not ended yet")
        answer = decoded(name, await self.response(name), _Answered)
        return await self.items(name) + answer.output

    async def job(self, name: str) -> bytes:
        """b"" where there is none any more."""
        return await self._read(name, JOB)

    async def add_events(self, name: str, events: Sequence[bytes], index: int) -> None:
        """One that is too large for a part lies aside. Raises Conflict where there are not `index` events."""
        parts = [one if len(one) <= MAX_PART_BYTES else await self._laid_aside(name, one) for one in events]
        for group in _groups(parts):
            index = await self._store.append(_log(name, EVENTS), group, index=index, expires_at=self._expiry())

    async def _laid_aside(self, name: str, event: bytes) -> bytes:
        """What stands in its place: no event begins like it."""
        expires_at, log = self._expiry(), _log(name, LARGE)
        ends = [await self._store.append(log, [piece], expires_at=expires_at) for piece in parts_of(event)]
        return msgspec.json.encode([end - 1 for end in ends])

    async def _whole(self, name: str, part: bytes) -> bytes:
        """An event, from what stands in its place."""
        if not part.startswith(b"["):
            return part
        found = [await self._store.read(_log(name, LARGE), at) for at in decoded(name, part, list[int])]
        if not all(found):
            raise not_found(name)
        return b"".join(parts[0] for parts in found)

    async def num_events(self, name: str) -> int:
        return await self._store.length(_log(name, EVENTS))

    async def events(self, name: str, start: int = 0) -> AsyncIterator[bytes]:
        """Those from `start` on that there are now."""
        while parts := await self._store.read(_log(name, EVENTS), start):
            for part in parts:
                yield await self._whole(name, part)
            start += len(parts)

    async def unfinished(self) -> AsyncIterator[tuple[str, str]]:
        """Names and owners."""
        after = None
        while True:
            page = await self._store.page(UNFINISHED, "", limit=PAGE, after=after, newest_first=False)
            for record in page.records:
                after = record.position
                yield record.key, record.value.decode(errors="replace")
            if not page.more:
                return

    async def held_by(self, owner: str) -> Held:
        held = NOTHING
        async for _, kept in self._oldest_first(owner):
            held = held.plus(Held(1, kept.num_bytes))
        return held

    async def forget_oldest(self, owner: str, needed: Held, spare: Held) -> tuple[Held, float]:
        """See `Keeps`. Those that have not ended stay."""
        going, room = list[tuple[Record, Kept]](), NOTHING
        async for record, kept in self._oldest_first(owner):
            if needed.plus(spare).within(room):
                break
            if kept.ended:
                going.append((record, kept))
                room = room.plus(Held(1, kept.num_bytes))
        gone = NOTHING
        if needed.within(room):
            for record, kept in going:
                if await self._store.delete(RESPONSES, record.key):
                    gone = gone.plus(Held(1, kept.num_bytes))
                await self.drop(record.key)
        return gone, 0.0 if needed.within(room) else times.TICKET_RESTS_S

    async def _oldest_first(self, owner: str) -> AsyncIterator[tuple[Record, Kept]]:
        """What cannot be read counts as one that takes nothing, and stays."""
        after = None
        while True:
            page = await self._store.page(RESPONSES, owner, limit=MAX_PAGE_RECORDS, after=after, newest_first=False)
            for record in page.records:
                after, kept = record.position, Kept()
                with suppress(Unreadable):
                    kept = decoded(record.key, record.value, Kept)
                yield record, kept
            if not page.more:
                return

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        return await self._store.claim(f"response/{name}", holder, lease_s)

    async def release(self, name: str, holder: str) -> None:
        await self._store.release(f"response/{name}", holder)

    async def _put(self, name: str, owner: str, kept: Kept, expect: int) -> int:
        value = msgspec.json.encode(kept)
        return await self._store.put(RESPONSES, name, value, owner=owner, expect=expect, expires_at=self._expiry())

    async def _write(self, name: str, log: str, data: bytes) -> None:
        parts, expires_at = parts_of(data), self._expiry()
        for i in range(0, len(parts), PARTS_PER_APPEND):
            group = parts[i : i + PARTS_PER_APPEND]
            await self._store.append(_log(name, log), group, index=i, expires_at=expires_at)

    async def _read(self, name: str, log: str) -> bytes:
        found: list[bytes] = []
        while parts := await self._store.read(_log(name, log), len(found)):
            found += parts
        return b"".join(found)

    async def _size(self, name: str, log: str) -> int:
        size = start = 0
        while parts := await self._store.read(_log(name, log), start):
            size, start = size + sum(map(len, parts)), start + len(parts)
        return size

    async def _there(self, name: str, log: str) -> bytes:
        """Raises PagodaError NOT_FOUND where it has expired, a little before the record does."""
        if data := await self._read(name, log):
            return data
        raise not_found(name)

    def _expiry(self) -> float:
        return time.time() + self._keep_s


def not_found(name: str) -> PagodaError:
    return PagodaError(ErrorCode.NOT_FOUND, f"there is no response {name[:64]!a}")


def _groups(parts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """As many as may be appended at once."""
    group, room = list[bytes](), MAX_APPEND_BYTES
    for part in parts:
        if group and (len(group) == PAGE or len(part) > room):
            yield group
            group, room = [], MAX_APPEND_BYTES
        group.append(part)
        room -= len(part)
    if group:
        yield group


def _log(name: str, log: str) -> str:
    return f"response/{name}/{log}"
