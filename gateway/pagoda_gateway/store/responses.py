"""Stored responses: the request and its answer, for clients that retrieve a response or continue its conversation.

A response is a record that names the logs it needs (`response_logs.py`); the record is written last and deleted first.
Data that several writers might write gets a new name with every write, so no writer overwrites or drops another's; the
writer whose record is there has kept the response. What no record names yet is listed until a sweep finds it: logs in
LOOSE, and a response that is to run in the background in `UNFINISHED`, where gateways look for work. A deleted response
leaves a tombstone for a while, so that a gateway that is still running it does not store it again.

A background response is stored from its beginning: its job, so that any gateway can run it, and its events so far. Room
for events is reserved, in its record, before they are written.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pagoda_gateway.store.interface import ABSENT, Conflict, Full, Record, Store, Unreadable, decoded, unavailable
from pagoda_gateway.store.response_logs import (
    EVENTS,
    ITEMS,
    JOB,
    LARGE,
    OUTPUT,
    Logs,
    LooseLogs,
    log_of,
    new_content,
    not_found,
    records_of,
    to_its_end,
)
from pagoda_gateway.store.room import NOTHING, Held, Room
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

RESPONSES = "responses"
UNFINISHED = "unfinished_responses"
ROOMY = Held(2**31, 2**50)
RESERVED_BYTES = 64 * 1024  # reserved at a time, so that not every event changes the record ..
RESERVED_PART = 64  # .. but at most this fraction (1/64) of what a tenant may keep
_NAME = re.compile(r"resp_[0-9a-f]{32}")


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a record. `ended`: its object is stored; `cancelled`: a client wants it to end; `gone`: it was
    deleted. `num_bytes`: the size of its logs, as far as known when the record was written; `reserved`: how much they
    may grow before it ends. `content`: part of the name of its object's log and, unless it was begun in the background,
    of its items' log ("" in records of earlier versions).
    """

    background: bool = False
    streamed: bool = False
    ended: bool = False
    cancelled: bool = False
    gone: bool = False
    num_bytes: int = 0
    reserved: int = 0
    content: str = ""

    @property
    def held(self) -> Held:
        return Held(1, self.num_bytes + self.reserved)

    def items_log(self, name: str) -> str:
        return log_of(name, ITEMS, "" if self.background else self.content)

    def object_log(self, name: str) -> str:
        return log_of(name, OUTPUT, self.content)

    def logs(self, name: str) -> set[str]:
        """All logs that it needs."""
        if self.gone:
            return set()
        logs = {self.items_log(name), self.object_log(name)}
        return logs | _logs_of_begun(name) if self.background else logs


class _Headed(msgspec.Struct, frozen=True):
    """The part of a job that clients see."""

    head: dict[str, Any]


class _Answered(msgspec.Struct, frozen=True):
    """The part of a response that its conversation continues with."""

    output: list[dict[str, Any]]


class KeptResponses:
    """Responses in one store, whose errors it raises; NOT_FOUND if `owner` has no such response."""

    what = "responses"

    def __init__(self, store: Store, keep_s: float, most: Held = ROOMY) -> None:
        self._store = store
        self._keep_s = keep_s
        self._room = Room(self, *most)
        self._reserved_at_once = min(RESERVED_BYTES, most.num_bytes // RESERVED_PART)
        self._logs = Logs(store, self._expiry)
        self._loose = LooseLogs(store, self._expiry, self._named)

    async def find(self, name: str, owner: str) -> tuple[Record, Kept]:
        record = await self._store.get(RESPONSES, name) if _NAME.fullmatch(name) else None
        if record is None or record.owner != owner or (kept := _read(record)).gone:
            raise not_found(name)
        return record, kept

    async def finished(self, name: str, owner: str, items: bytes, response: bytes) -> None:
        """Store a response that has ended, unless it is stored already. Completes even if its caller is cancelled:
        others rely on it.

        Raises:
            PagodaError: NOT_FOUND if it was deleted; RATE_LIMITED and REQUEST_TOO_LARGE if there is no room.
        """
        record = await self._store.get(RESPONSES, name)
        if record is not None and await self._is_whole(record):
            return
        kept = Kept(ended=True, num_bytes=len(items) + len(response), content=new_content())
        contents = {kept.items_log(name): items, kept.object_log(name): response}
        try:
            async with self._room.taking(owner, kept.num_bytes):
                await to_its_end(self._keep(name, owner, kept, contents, record))
        except Conflict:
            await self.find(name, owner)  # another writer has stored it, or it was deleted

    async def _is_whole(self, record: Record) -> bool:
        """Raises PagodaError NOT_FOUND if it was deleted."""
        kept = _read(record)
        if kept.gone:
            raise not_found(record.key)
        return not kept.ended or await self._store.length(kept.object_log(record.key)) > 0

    async def begin(self, name: str, owner: str, items: bytes, job: bytes, *, streamed: bool) -> int:
        """Store a response that is to run in the background, and return its record's version. Raises as `finished`.

        A caller that is cancelled, or cannot write all of it, takes it back. If that fails too, a later sweep runs the
        response if its record is there, and otherwise removes it."""
        kept = Kept(background=True, streamed=streamed, num_bytes=len(items) + len(job))
        async with self._room.taking(owner, kept.num_bytes):
            try:
                return await to_its_end(self._begun(name, owner, items, job, kept))
            except BaseException as error:
                with suppress(PagodaError):
                    await to_its_end(self._take_back(name, owner))
                if isinstance(error, Conflict):
                    raise unavailable("it took so long that it was given up elsewhere", times.STORE_REST_S) from error
                raise

    async def _begun(self, name: str, owner: str, items: bytes, job: bytes, kept: Kept) -> int:
        await self._list_unfinished(name, owner)
        await self._logs.write(log_of(name, ITEMS), items)
        await self._logs.write(log_of(name, JOB), job)
        return await self._put(name, owner, kept, ABSENT)

    async def _take_back(self, name: str, owner: str) -> None:
        """Mark it deleted, so that a write still in flight finds that, and remove its logs."""
        await self._put_gone(name, owner, None)
        await self._clear(name)

    async def reserve(self, name: str, owner: str, num_bytes: int) -> int:
        """Reserve room for `num_bytes` more of a running response; returns how much it may write.

        Raises:
            Conflict: it has ended elsewhere.
            PagodaError: RATE_LIMITED and REQUEST_TOO_LARGE if there is no room.
        """
        record, kept = await self.find(name, owner)
        num_bytes = max(num_bytes, self._reserved_at_once)
        async with self._room.taking(owner, num_bytes, number=0):
            while not kept.ended:
                with suppress(Conflict):
                    more = msgspec.structs.replace(kept, reserved=kept.reserved + num_bytes)
                    await self._put(name, owner, more, record.version)
                    return num_bytes
                record, kept = await self.find(name, owner)
            raise Conflict

    async def end(self, record: Record, kept: Kept, response: bytes, content: str) -> None:
        """Store the end, for which the caller has reserved room. `content` is a new name, by which a caller that gets
        no answer can find out whether the write happened. Raises Conflict if the record has changed."""
        name = record.key
        events, large, job = [await self._logs.size(log_of(name, kind)) for kind in (EVENTS, LARGE, JOB)]
        num_bytes = kept.num_bytes - job + len(response) + events + large
        ended = msgspec.structs.replace(kept, ended=True, num_bytes=num_bytes, reserved=0, content=content)
        await self._keep(name, record.owner, ended, {ended.object_log(name): response}, record)
        self._room.freed(record.owner, kept.held.minus(ended.held))
        await self.close(name)

    async def close(self, name: str) -> None:
        """Remove the job and the entry in UNFINISHED of a response that has ended."""
        await self._store.drop(log_of(name, JOB))
        await self._store.delete(UNFINISHED, name)

    async def cancel(self, name: str, owner: str) -> None:
        """Have the gateway that runs it end it. Does nothing if it has ended."""
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
        record, kept = await self.find(name, owner)
        while not await self._let_go_of(record, kept, for_good=True):
            record, kept = await self.find(name, owner)
        self._room.freed(owner, kept.held)

    async def bury(self, name: str, owner: str) -> None:
        """Clean up a response that is listed but has no record: prevent a late record, and remove what is left."""
        try:
            await self._put_gone(name, owner, ABSENT)
        except Conflict:
            record = await self._store.get(RESPONSES, name)
            if record is not None and not _read(record).gone:
                await self._list_unfinished(name, record.owner)
                return
        await self._clear(name)

    async def sweep(self) -> None:
        """Remove logs that no record names and no writer works on any more."""
        await self._loose.sweep()

    async def items(self, name: str, kept: Kept) -> list[dict[str, Any]]:
        return decoded(name, await self._there(name, kept.items_log(name)), list[dict[str, Any]])

    async def response(self, name: str, kept: Kept) -> bytes:
        """The object of a response that has ended."""
        return await self._there(name, kept.object_log(name))

    async def begun(self, name: str, kept: Kept) -> dict[str, Any] | None:
        """The object, made from its job, of a response that does not run here. None if the job is gone because the
        response has ended meanwhile."""
        if not (data := await self.job(name)):
            return None
        status = "cancelled" if kept.cancelled else "in_progress"
        head = decoded(name, data, _Headed).head
        return {**head, "status": status, "output": [], "usage": None}

    async def conversation(self, name: str, owner: str) -> list[dict[str, Any]]:
        """Its input and its output, as items."""
        _, kept = await self.find(name, owner)
        if not kept.ended:
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, f"the response {name[:64]!a} has not ended yet")
        answer = decoded(name, await self.response(name, kept), _Answered)
        return await self.items(name, kept) + answer.output

    async def job(self, name: str) -> bytes:
        """b"" if it is gone."""
        return await self._logs.read(log_of(name, JOB))

    async def add_events(self, name: str, events: Sequence[bytes], index: int) -> None:
        """The caller has reserved room. Raises Conflict unless there are `index` events."""
        await self._logs.add_events(name, events, index)

    async def num_events(self, name: str) -> int:
        return await self._store.length(log_of(name, EVENTS))

    def events(self, name: str, start: int = 0) -> AsyncIterator[bytes]:
        """The events stored so far, from `start` on."""
        return self._logs.events(name, start)

    async def unfinished(self) -> AsyncIterator[tuple[str, str]]:
        """Names and owners."""
        async for record in records_of(self._store, UNFINISHED, ""):
            yield record.key, record.value.decode(errors="replace")

    async def held_by(self, owner: str) -> Held:
        held = NOTHING
        async for _, kept in self._oldest_first(owner):
            held = held.plus(kept.held)
        return held

    async def forget_oldest(self, owner: str, needed: Held, spare: Held) -> tuple[Held, float]:
        """See `Keeps`. Responses that have not ended stay."""
        going, room = list[tuple[Record, Kept]](), NOTHING
        async for record, kept in self._oldest_first(owner):
            if needed.plus(spare).within(room):
                break
            if kept.ended:
                going.append((record, kept))
                room = room.plus(kept.held)
        gone = NOTHING
        if needed.within(room):
            for record, kept in going:
                if await self._let_go_of(record, kept, for_good=False):
                    gone = gone.plus(kept.held)
        return gone, 0.0 if needed.within(room) else times.TICKETS_FRESH_S

    async def _oldest_first(self, owner: str) -> AsyncIterator[tuple[Record, Kept]]:
        """A record that cannot be read counts as a response of no bytes, and stays."""
        async for record in records_of(self._store, RESPONSES, owner):
            kept = Kept()
            with suppress(Unreadable):
                kept = _read(record)
            if not kept.gone:
                yield record, kept

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        return await self._store.claim(f"response/{name}", holder, lease_s)

    async def release(self, name: str, holder: str) -> None:
        await self._store.release(f"response/{name}", holder)

    # Writing and deleting a record together with its logs

    async def _keep(
        self, name: str, owner: str, kept: Kept, contents: Mapping[str, bytes], replaced: Record | None
    ) -> None:
        """Write logs of this writer's own, then the record that names them. Raises Conflict as `put` does."""
        old = set[str]() if replaced is None else _read(replaced).logs(name) - kept.logs(name)
        entry = await self._loose.enter(name, {*contents, *old})
        try:
            for log, data in contents.items():
                await self._logs.write(log, data)
            version = await self._put(name, owner, kept, ABSENT if replaced is None else replaced.version)
        except (Conflict, Full):  # the record was not written; after any other failure it may have been
            with suppress(PagodaError, Conflict):
                await self._loose.settle(entry)
            raise
        try:
            with suppress(PagodaError):
                await self._loose.settle(entry)
        except Conflict:
            await self._store.delete(RESPONSES, name, expect=version)
            for log in contents:
                await self._store.drop(log)
            raise unavailable("it took so long that it was cleared away", times.STORE_REST_S) from None

    async def _let_go_of(self, record: Record, kept: Kept, *, for_good: bool) -> bool:
        """Delete it. False if it has changed since it was found. A sweep removes whatever this leaves behind."""
        entry = await self._loose.enter_going(record.key, kept.logs(record.key))
        try:
            if for_good:
                await self._put_gone(record.key, record.owner, record.version)
            else:
                await self._store.delete(RESPONSES, record.key, expect=record.version)
        except Conflict:
            with suppress(PagodaError, Conflict):
                await self._loose.settle(entry)
            return False
        with suppress(PagodaError, Conflict):
            await self._loose.settle(entry)
            if kept.background:
                await self._store.delete(UNFINISHED, record.key)
        return True

    async def _clear(self, name: str) -> None:
        """Remove what may be left of a background response that has no record."""
        for log in sorted(_logs_of_begun(name)):
            await self._store.drop(log)
        await self._store.delete(UNFINISHED, name)

    async def _named(self, name: str) -> set[str]:
        record = await self._store.get(RESPONSES, name)
        return set() if record is None else _read(record).logs(name)

    async def _list_unfinished(self, name: str, owner: str) -> None:
        await self._store.put(UNFINISHED, name, owner.encode(), expires_at=self._expiry())

    async def _put(self, name: str, owner: str, kept: Kept, expect: int) -> int:
        value = msgspec.json.encode(kept)
        return await self._store.put(RESPONSES, name, value, owner=owner, expect=expect, expires_at=self._expiry())

    async def _put_gone(self, name: str, owner: str, expect: int | None) -> None:
        value, expires_at = msgspec.json.encode(Kept(ended=True, gone=True)), time.time() + times.RESPONSE_LOOSE_S
        try:
            await self._store.put(RESPONSES, name, value, owner=owner, expect=expect, expires_at=expires_at)
        except Full:  # then a gateway that still runs it has no room to store it, either
            await self._store.delete(RESPONSES, name, expect=expect)

    async def _there(self, name: str, log: str) -> bytes:
        """Raises PagodaError NOT_FOUND if it has expired, which happens a little before the record does."""
        if data := await self._logs.read(log):
            return data
        raise not_found(name)

    def _expiry(self) -> float:
        return time.time() + self._keep_s


def _read(record: Record) -> Kept:
    """Raises Unreadable."""
    return decoded(record.key, record.value, Kept)


def _logs_of_begun(name: str) -> set[str]:
    """Logs of a background response whose names have no `content`."""
    return {log_of(name, kind) for kind in (ITEMS, JOB, EVENTS, LARGE, OUTPUT)}
