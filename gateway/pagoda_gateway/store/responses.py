"""Responses that are kept: what was asked and answered, for whoever asks again or goes on from there.

A response is a record, which is the last that is written of it and the first that goes, and which names the logs that
it needs (`response_logs.py`). What more than one writer might write has a name that is new with every write, so nobody
overwrites or drops what is another's, and of several writers that one has kept it whose record is there. What is in no
record stands in a list, until whoever sweeps has found it: logs in LOOSE, and one that is to run in the background in
`UNFINISHED`, for gateways that look for work. One that was deleted leaves word for a while, so that nobody who is still
at it keeps it again.

One in the background is kept from its beginning: its job is there, so any gateway can run it, and its events as far as
they were told. Room for them is taken before they are written, and stands in its record.
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
RESERVED_BYTES = 64 * 1024  # at a time, so that not every event changes a record ..
RESERVED_PART = 64  # .. but no more than one of so many parts of what a tenant may have
_NAME = re.compile(r"resp_[0-9a-f]{32}")


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a record. `ended`: its object is there; `cancelled`: somebody wants it to end; `gone`: it was
    deleted. `num_bytes`: what lies beside it, as far as that was known when it was written; `reserved`: how much more
    there may be, before it ends. `content`: the name of its object, and, where it was not begun in the background, of
    its items ("" where a version before this kept it).
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
        """All that it needs."""
        if self.gone:
            return set()
        logs = {self.items_log(name), self.object_log(name)}
        return logs | _logs_of_begun(name) if self.background else logs


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
        self._reserved_at_once = min(RESERVED_BYTES, most.num_bytes // RESERVED_PART)
        self._logs = Logs(store, self._expiry)
        self._loose = LooseLogs(store, self._expiry, self._named)

    async def find(self, name: str, owner: str) -> tuple[Record, Kept]:
        record = await self._store.get(RESPONSES, name) if _NAME.fullmatch(name) else None
        if record is None or record.owner != owner or (kept := _read(record)).gone:
            raise not_found(name)
        return record, kept

    async def finished(self, name: str, owner: str, items: bytes, response: bytes) -> None:
        """Keep one that has ended, unless it is kept. Goes on where its caller is cancelled: others rely on it.

        Raises:
            PagodaError: NOT_FOUND where it was deleted; RATE_LIMITED and REQUEST_TOO_LARGE, where there is no room.
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
            await self.find(name, owner)  # somebody else has kept it, or it was deleted

    async def _is_whole(self, record: Record) -> bool:
        """Raises PagodaError NOT_FOUND where it was deleted."""
        kept = _read(record)
        if kept.gone:
            raise not_found(record.key)
        return not kept.ended or await self._store.length(kept.object_log(record.key)) > 0

    async def begin(self, name: str, owner: str, items: bytes, job: bytes, *, streamed: bool) -> int:
        """Keep one that is to run in the background; the version of its record. Raises PagodaError as `finished`.

        Who is cancelled, or cannot write all of it, takes it back; where he cannot do that either, it is run by whoever
        sweeps, if its record is there, and else cleared away."""
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
        """A write that is still on its way finds that it was deleted."""
        await self._put_gone(name, owner, None)
        await self._clear(name)

    async def reserve(self, name: str, owner: str, num_bytes: int) -> int:
        """Take room for so much more that one that runs is going to write; how much it may write then.

        Raises:
            Conflict: It has ended elsewhere.
            PagodaError: RATE_LIMITED and REQUEST_TOO_LARGE, where there is no room.
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
        """`content`: a new name, by which whoever does not know whether this was done finds out. Room is taken before.
        Raises Conflict when the record is not that one any more."""
        name = record.key
        events, large, job = [await self._logs.size(log_of(name, kind)) for kind in (EVENTS, LARGE, JOB)]
        num_bytes = kept.num_bytes - job + len(response) + events + large
        ended = msgspec.structs.replace(kept, ended=True, num_bytes=num_bytes, reserved=0, content=content)
        await self._keep(name, record.owner, ended, {ended.object_log(name): response}, record)
        self._room.freed(record.owner, kept.held.minus(ended.held))
        await self.close(name)

    async def close(self, name: str) -> None:
        """Nothing is left to do for one that has ended."""
        await self._store.drop(log_of(name, JOB))
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
        record, kept = await self.find(name, owner)
        while not await self._let_go_of(record, kept, for_good=True):
            record, kept = await self.find(name, owner)
        self._room.freed(owner, kept.held)

    async def bury(self, name: str, owner: str) -> None:
        """One that is listed, and has no record: none comes any more, and what is left of it goes."""
        try:
            await self._put_gone(name, owner, ABSENT)
        except Conflict:
            record = await self._store.get(RESPONSES, name)
            if record is not None and not _read(record).gone:
                await self._list_unfinished(name, record.owner)
                return
        await self._clear(name)

    async def sweep(self) -> None:
        """Clear away what nobody is at any more, and no record names."""
        await self._loose.sweep()

    async def items(self, name: str, kept: Kept) -> list[dict[str, Any]]:
        return decoded(name, await self._there(name, kept.items_log(name)), list[dict[str, Any]])

    async def response(self, name: str, kept: Kept) -> bytes:
        """The object of one that has ended."""
        return await self._there(name, kept.object_log(name))

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
        answer = decoded(name, await self.response(name, kept), _Answered)
        return await self.items(name, kept) + answer.output

    async def job(self, name: str) -> bytes:
        """b"" where there is none any more."""
        return await self._logs.read(log_of(name, JOB))

    async def add_events(self, name: str, events: Sequence[bytes], index: int) -> None:
        """Room is taken before. Raises Conflict where there are not `index` events."""
        await self._logs.add_events(name, events, index)

    async def num_events(self, name: str) -> int:
        return await self._store.length(log_of(name, EVENTS))

    def events(self, name: str, start: int = 0) -> AsyncIterator[bytes]:
        """Those from `start` on that there are now."""
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
        """See `Keeps`. Those that have not ended stay."""
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
        """What cannot be read counts as one that takes nothing, and stays."""
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

    # What of a response is written, and goes, together

    async def _keep(
        self, name: str, owner: str, kept: Kept, contents: Mapping[str, bytes], replaced: Record | None
    ) -> None:
        """Logs that nobody else has, and then the record that names them. Raises Conflict as `put` does."""
        old = set[str]() if replaced is None else _read(replaced).logs(name) - kept.logs(name)
        entry = await self._loose.enter(name, {*contents, *old})
        try:
            for log, data in contents.items():
                await self._logs.write(log, data)
            version = await self._put(name, owner, kept, ABSENT if replaced is None else replaced.version)
        except (Conflict, Full):  # so the record is not there; of another failure nobody knows
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
        """False where it is not as it was found. What is not done of the rest is done by whoever sweeps."""
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
        """What may be left of one in the background that has no record."""
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
        except Full:  # nor is there for whoever is still at it
            await self._store.delete(RESPONSES, name, expect=expect)

    async def _there(self, name: str, log: str) -> bytes:
        """Raises PagodaError NOT_FOUND where it has expired, a little before the record does."""
        if data := await self._logs.read(log):
            return data
        raise not_found(name)

    def _expiry(self) -> float:
        return time.time() + self._keep_s


def _read(record: Record) -> Kept:
    """Raises Unreadable."""
    return decoded(record.key, record.value, Kept)


def _logs_of_begun(name: str) -> set[str]:
    """Those of one in the background that have one writer."""
    return {log_of(name, kind) for kind in (ITEMS, JOB, EVENTS, LARGE, OUTPUT)}
