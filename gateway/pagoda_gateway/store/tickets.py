"""Tickets that are kept: what a client asked that may ask again, and what was answered.

A ticket is a small record under a name that follows from its owner and its client's key for it, so of two gateways that
are asked the same at once one writes it first, and the other one finds it. The job lies beside it and is written before
it; the answer is a log of its run, which the ticket names once it is whole. All of it vanishes together, and nothing
prolongs it. That it is not there says nothing to who runs it, as a store may lose what it had; one that is forgotten
leaves word.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from pagoda_gateway.store.interface import (
    ABSENT,
    MAX_APPEND_BYTES,
    MAX_PAGE_RECORDS,
    MAX_VALUE_BYTES,
    Conflict,
    Record,
    Store,
    Unreadable,
    decoded,
    parts_of,
)
from pagoda_gateway.store.room import NOTHING, Held
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

TICKETS = "tickets"
JOBS = "ticket_jobs"
HANDED = "ticket_tapes"
FORGOTTEN = "forgotten_tickets"
NAME_PREFIX = "stream_"
OTHERS = 64  # that may be forgotten, too, are looked for, as another gateway may forget the first ones at the same time


class Ticket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`digest` is that of the request; `num_bytes` what job and answer take; `runner` the gateway that began to run it
    last, which ended at `ended_at` (Unix seconds; 0: it runs, or nobody knows). `answered`: its answer is there, in
    the log of this name (of none where a version before this kept it). One in the `background` is run elsewhere, for
    all that is known here since it began; its job is kept with its response.
    """

    digest: str
    path: str
    job_id: str
    num_bytes: int
    stream: bool = False
    background: bool = False
    runner: str = ""
    answered: bool = False
    answer: str = ""
    ended_at: float = 0.0

    @property
    def held(self) -> Held:
        return Held(1, self.num_bytes)

    def rests_s(self, now: float) -> float:
        """For how long it is still likely to be asked for: endless while it runs; a clock that was wrong counts for
        nothing."""
        if not self.ended_at:
            return math.inf
        rest_s = times.BACKGROUND_TICKET_RESTS_S if self.background else times.TICKET_RESTS_S
        left_s = self.ended_at + rest_s - now
        return left_s if left_s <= 2 * rest_s else 0.0


class _Ticketed(msgspec.Struct, frozen=True):
    """Of a job, what leads from it to its ticket; all that is kept here of one in the background."""

    ticket: str = ""


class Found(NamedTuple):
    record: Record
    ticket: Ticket

    @property
    def name(self) -> str:
        return self.record.key

    @property
    def owner(self) -> str:
        return self.record.owner


def ticket_name(owner: str, key: str) -> str:
    return NAME_PREFIX + hashlib.sha256(f"{len(owner)} {owner}{key}".encode()).hexdigest()[:32]


def check_job(job: bytes) -> None:
    """Raises PagodaError where it is too large to be kept."""
    if len(job) > MAX_VALUE_BYTES:
        message = f"a request with an Idempotency-Key may take {MAX_VALUE_BYTES} bytes, prompt and tools included"
        raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, f"{message}; this one takes {len(job)}")


def not_found(name: str) -> PagodaError:
    return PagodaError(ErrorCode.NOT_FOUND, f"there is no stream {name[:64]!a}")


class KeptTickets:
    """Of one store, whose errors it raises."""

    what = "requests with an Idempotency-Key"

    def __init__(self, store: Store, keep_s: float) -> None:
        self._store = store
        self._keep_s = keep_s
        self._dropping: set[asyncio.Task[None]] = set()

    async def find(self, name: str, owner: str) -> Found | None:
        record = await self._store.get(TICKETS, name)
        if record is None or record.owner != owner:
            return None
        return Found(record, decoded(name, record.value, Ticket))

    async def of_job(self, job_id: str, owner: str) -> Found | None:
        """None also where it cannot be read."""
        found = None
        with suppress(Unreadable):
            record = await self._store.get(JOBS, job_id)
            if record is not None and record.owner == owner:
                found = await self.find(decoded(job_id, record.value, _Ticketed).ticket, owner)
        return found if found is not None and found.ticket.job_id == job_id else None

    async def begin(self, name: str, owner: str, ticket: Ticket, job: bytes) -> Found:
        """`job` is b"" for one in the background. Raises Conflict where there is one of this name."""
        expires_at, job = time.time() + self._keep_s, job or msgspec.json.encode(_Ticketed(name))
        await self._store.put(JOBS, ticket.job_id, job, owner=owner, expires_at=expires_at)
        value = msgspec.json.encode(ticket)
        try:
            version = await self._store.put(TICKETS, name, value, owner=owner, expect=ABSENT, expires_at=expires_at)
        except Conflict:
            there = await self.find(name, owner)
            if there is None or there.ticket.job_id != ticket.job_id:  # else that is what its job is kept for
                await self._store.delete(JOBS, ticket.job_id)
            raise
        return Found(Record(name, owner, value, version, version, expires_at), ticket)

    async def change(self, found: Found, **fields: object) -> Found:
        """Raises Conflict where it is not that one any more."""
        record, ticket = found.record, msgspec.structs.replace(found.ticket, **fields)
        value = msgspec.json.encode(ticket)
        version = await self._store.put(
            TICKETS, record.key, value, owner=record.owner, expect=record.version, expires_at=record.expires_at
        )
        return Found(record._replace(value=value, version=version), ticket)

    async def job(self, found: Found) -> bytes:
        """Raises PagodaError NOT_FOUND where it has expired, a little before its ticket."""
        record = await self._store.get(JOBS, found.ticket.job_id)
        if record is None:
            raise not_found(found.name)
        return record.value

    async def hand_over(self, found: Found, so_far: bytes, for_s: float) -> None:
        """What there is of its answer, for the gateway that goes on with it; one that is too large is not kept."""
        if len(so_far) <= MAX_VALUE_BYTES:
            expires_at = min(found.record.expires_at or math.inf, time.time() + for_s)
            await self._store.put(HANDED, found.ticket.job_id, so_far, owner=found.owner, expires_at=expires_at)

    async def handed_over(self, found: Found) -> bytes:
        """b"" where there is nothing."""
        record = await self._store.get(HANDED, found.ticket.job_id)
        return b"" if record is None else record.value

    async def keep_answer(self, found: Found, answer: bytes) -> bool:
        """False for one that is too large. Raises Conflict where another gateway has kept it, or is at it.

        The log's name is new, so nobody else has it: an answer that comes late replaces nobody's.
        """
        if len(answer) > MAX_APPEND_BYTES:
            return False
        old, name = found.ticket, secrets.token_hex(8)
        replaced = await self.answer(found) if old.answered else b""
        log = _answer_log(msgspec.structs.replace(old, answer=name))
        await self._store.append(log, parts_of(answer), index=0, expires_at=found.record.expires_at)
        num_bytes = old.num_bytes - len(replaced) + len(answer)
        try:
            await self.change(found, answered=True, answer=name, ended_at=time.time(), num_bytes=num_bytes)
        except Conflict:
            await self._store.drop(log)
            raise
        if old.answered:
            await self._store.drop(_answer_log(old))
        return True

    async def answer(self, found: Found) -> bytes:
        """b"" where it has expired, a little before its ticket."""
        parts: list[bytes] = []
        while more := await self._store.read(_answer_log(found.ticket), len(parts)):
            parts += more
        return b"".join(parts)

    def age_s(self, found: Found) -> float:
        return self._keep_s - ((found.record.expires_at or math.inf) - time.time())

    async def let_go(self, found: Found) -> Held:
        """Delete one of which there is nothing else; what it took. Raises Conflict where it is not that one now."""
        gone = await self._delete_as_it_was(found)
        await self._store.delete(JOBS, found.ticket.job_id)
        return gone

    async def _delete_as_it_was(self, found: Found) -> Held:
        """What it took. Raises Conflict."""
        was_there = await self._store.delete(TICKETS, found.name, expect=found.record.version)
        return found.ticket.held if was_there else NOTHING

    async def forget(self, found: Found) -> Held:
        """Delete it, and let whoever runs it know; what it took, as with `delete`."""
        expires_at = time.time() + 2 * times.TICKET_GRACE_S
        await self._store.put(FORGOTTEN, found.ticket.job_id, b"", owner=found.owner, expires_at=expires_at)
        return await self.delete(found)

    async def is_forgotten(self, job_id: str) -> bool:
        return await self._store.get(FORGOTTEN, job_id) is not None

    async def ended(self, found: Found) -> None:
        """Nobody runs it now. Raises Conflict where it is not that one any more."""
        await self.change(found, ended_at=time.time())

    async def delete(self, found: Found) -> Held:
        """As it is now, with what was kept of it since it was found; what it took, nothing where somebody else deleted
        it."""
        gone = NOTHING
        last: Found | None = found
        while last is not None and last.ticket.job_id == found.ticket.job_id:
            found = last
            try:
                gone = await self._delete_as_it_was(found)
                break
            except Conflict:
                last = await self.find(found.name, found.owner)
        await self._drop_rest(found)
        return gone

    async def _drop_rest(self, found: Found) -> None:
        await self._store.delete(JOBS, found.ticket.job_id)
        await self._store.delete(HANDED, found.ticket.job_id)
        await self._store.drop(_answer_log(found.ticket))

    async def held_by(self, owner: str) -> Held:
        held = NOTHING
        async for _, ticket in self._oldest_first(owner):
            held = held.plus(Held(1, 0) if ticket is None else ticket.held)
        return held

    async def forget_oldest(self, owner: str, needed: Held, spare: Held) -> tuple[Held, float]:
        """See `Keeps`."""
        going: list[Found] = []
        others = 0
        room, soon, now = NOTHING, list[tuple[float, Held]](), time.time()
        async for record, ticket in self._oldest_first(owner):
            if ticket is None:
                continue
            wait_s = ticket.rests_s(now)
            if wait_s == math.inf and not await self._is_nobodys(Found(record, ticket)):
                continue
            if 0.0 < wait_s < math.inf:
                soon.append((wait_s, ticket.held))
                continue
            going.append(Found(record, ticket))
            room = room.plus(ticket.held)
            if needed.plus(spare).within(room) and (others := others + 1) > OTHERS:
                break
        if needed.within(room):
            return await self._let_go_of(going, needed.plus(spare)), 0.0
        for wait_s, held in sorted(soon):
            room = room.plus(held)
            if needed.within(room):
                return NOTHING, wait_s
        return NOTHING, times.TICKET_RESTS_S

    async def _is_nobodys(self, found: Found) -> bool:
        """Whether it has ended without a word: its gateway was killed, or never came to run it."""
        if self.age_s(found) < times.TICKET_LEASE_S or not await self.claim(found.name, "nobody", 1.0):
            return False
        await self.release(found.name, "nobody")
        return True

    async def _let_go_of(self, several: list[Found], enough: Held) -> Held:
        """As many of those that are as they were found as make it enough. What else there is of them goes when nobody
        waits for it any more."""
        gone, room = list[Found](), NOTHING
        try:
            for found in several:
                if enough.within(room):
                    break
                with suppress(Conflict):
                    if await self._store.delete(TICKETS, found.name, expect=found.record.version):
                        gone.append(found)
                        room = room.plus(found.ticket.held)
        finally:
            task = asyncio.create_task(self._drop_rest_of(gone))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)
        return room

    async def _drop_rest_of(self, several: list[Found]) -> None:
        for found in several:
            with suppress(PagodaError):  # it expires
                await self._drop_rest(found)

    async def aclose(self) -> None:
        await asyncio.gather(*self._dropping)

    async def _oldest_first(self, owner: str) -> AsyncIterator[tuple[Record, Ticket | None]]:
        """None for one that cannot be read."""
        after = None
        while True:
            page = await self._store.page(TICKETS, owner, limit=MAX_PAGE_RECORDS, after=after, newest_first=False)
            for record in page.records:
                after = record.position
                ticket = None
                with suppress(Unreadable):
                    ticket = decoded(record.key, record.value, Ticket)
                yield record, ticket
            if not page.more:
                return

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        return await self._store.claim(f"ticket/{name}", holder, lease_s)

    async def release(self, name: str, holder: str) -> None:
        await self._store.release(f"ticket/{name}", holder)


def _answer_log(ticket: Ticket) -> str:
    return f"ticket/{ticket.job_id}/answer" + (f"/{ticket.answer}" if ticket.answer else "")
