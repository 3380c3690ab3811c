"""Stored tickets: requests that a client may repeat, and their answers.

A ticket is a small record whose name is derived from its owner and the client's key, so if two gateways get the same
request at once, one writes the ticket first and the other finds it. The job lies beside it and is written before it;
the answer is a log written by its run, which the ticket names once it is complete. All of it expires together, and
nothing prolongs it. A missing ticket means nothing to the gateway that runs it, because a store may lose its data; a
forgotten ticket leaves a tombstone.
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
    read_whole,
)
from pagoda_gateway.store.room import NOTHING, Held
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

TICKETS = "tickets"
JOBS = "ticket_jobs"
HANDED = "ticket_tapes"
FORGOTTEN = "forgotten_tickets"
NAME_PREFIX = "stream_"
OTHERS = 64  # spare candidates for forgetting, as another gateway may forget the first ones at the same time


class Ticket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`digest` is that of the request; `num_bytes` the size of job and answer; `runner` the gateway that last began to
    run it; that run ended at `ended_at` (Unix seconds; 0: it still runs, or nobody knows). `answered`: its answer is
    stored, in a log whose name ends with `answer` (without it, if an earlier version wrote it). A `background` ticket
    is run by another part of the gateway, and only its beginning is known here; its job is kept with its response.
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
        """For how long a client is still likely to ask for it: infinite while it runs; 0 if `ended_at` is so late that
        a clock must have been wrong."""
        if not self.ended_at:
            return math.inf
        rest_s = times.BACKGROUND_TICKET_RESTS_S if self.background else times.TICKET_RESTS_S
        left_s = self.ended_at + rest_s - now
        return left_s if left_s <= 2 * rest_s else 0.0


class _Ticketed(msgspec.Struct, frozen=True):
    """The part of a job that leads to its ticket; for a background response, all that is kept here."""

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
    """Raises PagodaError if it is too large to be stored."""
    if len(job) > MAX_VALUE_BYTES:
        message = f"a request with an Idempotency-Key may take {MAX_VALUE_BYTES} bytes, prompt and tools included"
        raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, f"{message}; this one takes {len(job)}")


def not_found(name: str) -> PagodaError:
    return PagodaError(ErrorCode.NOT_FOUND, f"there is no stream {name[:64]!a}")


class KeptTickets:
    """Tickets in one store, whose errors it raises."""

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
        """None also if it cannot be read."""
        found = None
        with suppress(Unreadable):
            record = await self._store.get(JOBS, job_id)
            if record is not None and record.owner == owner:
                found = await self.find(decoded(job_id, record.value, _Ticketed).ticket, owner)
        return found if found is not None and found.ticket.job_id == job_id else None

    async def begin(self, name: str, owner: str, ticket: Ticket, job: bytes) -> Found:
        """`job` is b"" for a background response. Raises Conflict if there is a ticket of this name."""
        expires_at, job = time.time() + self._keep_s, job or msgspec.json.encode(_Ticketed(name))
        await self._store.put(JOBS, ticket.job_id, job, owner=owner, expires_at=expires_at)
        value = msgspec.json.encode(ticket)
        try:
            version = await self._store.put(TICKETS, name, value, owner=owner, expect=ABSENT, expires_at=expires_at)
        except Conflict:
            there = await self.find(name, owner)
            if there is None or there.ticket.job_id != ticket.job_id:  # otherwise that ticket needs the job
                await self._store.delete(JOBS, ticket.job_id)
            raise
        return Found(Record(name, owner, value, version, version, expires_at), ticket)

    async def change(self, found: Found, **fields: object) -> Found:
        """Raises Conflict if the ticket has changed."""
        record, ticket = found.record, msgspec.structs.replace(found.ticket, **fields)
        value = msgspec.json.encode(ticket)
        version = await self._store.put(
            TICKETS, record.key, value, owner=record.owner, expect=record.version, expires_at=record.expires_at
        )
        return Found(record._replace(value=value, version=version), ticket)

    async def job(self, found: Found) -> bytes:
        """Raises PagodaError NOT_FOUND if it has expired, which happens a little before its ticket does."""
        record = await self._store.get(JOBS, found.ticket.job_id)
        if record is None:
            raise not_found(found.name)
        return record.value

    async def hand_over(self, found: Found, so_far: bytes, for_s: float) -> None:
        """Store the answer so far, for the gateway that continues it, unless it is too large."""
        if len(so_far) <= MAX_VALUE_BYTES:
            expires_at = min(found.record.expires_at or math.inf, time.time() + for_s)
            await self._store.put(HANDED, found.ticket.job_id, so_far, owner=found.owner, expires_at=expires_at)

    async def handed_over(self, found: Found) -> bytes:
        """b"" if nothing was handed over."""
        record = await self._store.get(HANDED, found.ticket.job_id)
        return b"" if record is None else record.value

    async def keep_answer(self, found: Found, answer: bytes) -> bool:
        """False if it is too large. Raises Conflict if another gateway has stored it, or is running it.

        The log's name is new, so an answer that comes late overwrites no other.
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
        """b"" if it has expired, which happens a little before its ticket does."""
        return await read_whole(self._store, _answer_log(found.ticket))

    def age_s(self, found: Found) -> float:
        return self._keep_s - ((found.record.expires_at or math.inf) - time.time())

    async def let_go(self, found: Found) -> Held:
        """Delete a ticket that has nothing but its job; returns the room it took. Raises Conflict if it has changed."""
        gone = await self._delete_as_it_was(found)
        await self._store.delete(JOBS, found.ticket.job_id)
        return gone

    async def _delete_as_it_was(self, found: Found) -> Held:
        """Returns the room it took. Raises Conflict if it has changed."""
        was_there = await self._store.delete(TICKETS, found.name, expect=found.record.version)
        return found.ticket.held if was_there else NOTHING

    async def forget(self, found: Found) -> Held:
        """Delete it, leaving a tombstone for the gateway that runs it; returns the room it took, as `delete` does."""
        expires_at = time.time() + 2 * times.TICKET_GRACE_S
        await self._store.put(FORGOTTEN, found.ticket.job_id, b"", owner=found.owner, expires_at=expires_at)
        return await self.delete(found)

    async def is_forgotten(self, job_id: str) -> bool:
        return await self._store.get(FORGOTTEN, job_id) is not None

    async def ended(self, found: Found) -> None:
        """Record that no gateway runs it now. Raises Conflict if it has changed."""
        await self.change(found, ended_at=time.time())

    async def delete(self, found: Found) -> Held:
        """Delete it in its current version, including what was stored since it was found; returns the room it took, or
        NOTHING if another gateway deleted it."""
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
        """Whether it has no runner and no recorded end: its gateway was killed, or never started to run it."""
        if self.age_s(found) < times.TICKET_LEASE_S or not await self.claim(found.name, "nobody", 1.0):
            return False
        await self.release(found.name, "nobody")
        return True

    async def _let_go_of(self, several: list[Found], enough: Held) -> Held:
        """Delete tickets that have not changed since they were found, until `enough` room is freed. Their jobs and
        answers are deleted later, while no client waits."""
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
            with suppress(PagodaError):  # then it expires
                await self._drop_rest(found)

    async def aclose(self) -> None:
        await asyncio.gather(*self._dropping)

    async def _oldest_first(self, owner: str) -> AsyncIterator[tuple[Record, Ticket | None]]:
        """The ticket is None if it cannot be read."""
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
