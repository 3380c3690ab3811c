"""Bounds how much of one kind is stored for a tenant: counted in the store now and then, in between by what this
gateway writes.

If there seems to be no room, it counts again before deleting anything, because something may be gone already. Then it
forgets the oldest entries that no client is likely to ask for again; if those would not make enough room, it forgets
none, and does not try again for a while. Between counts, several gateways may each fill the room that they know of, so
together they exceed the bound by at most that much.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagoda_gateway.store.interface import Conflict
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

MAX_TENANTS = 4096  # remembered at once
SPARE = 256  # 1/256 of the bound is freed in addition, so that not every request has to make room
TRIES = 5  # because other gateways may forget the same entries at the same time


class Held(NamedTuple):
    """What an owner has stored, in total."""

    number: int
    num_bytes: int

    def plus(self, other: Held) -> Held:
        return Held(self.number + other.number, self.num_bytes + other.num_bytes)

    def minus(self, other: Held) -> Held:
        """Never below zero."""
        return Held(max(self.number - other.number, 0), max(self.num_bytes - other.num_bytes, 0))

    def within(self, other: Held) -> bool:
        return self.number <= other.number and self.num_bytes <= other.num_bytes


NOTHING = Held(0, 0)


class Keeps(Protocol):
    """`what`: the plural noun for messages to clients."""

    @property
    def what(self) -> str: ...

    async def held_by(self, owner: str) -> Held: ...

    async def forget_oldest(self, owner: str, needed: Held, spare: Held) -> tuple[Held, float]:
        """Delete entries that no client is likely to ask for again, the oldest first, if that frees the room `needed`;
        and up to `spare` more.

        Returns:
            What was deleted; if nothing, in how many seconds there may be room at the earliest.
        """
        ...


@dataclass
class Tenant:
    """`held` is what a tenant has, as last counted and with what was written since. `coming` has its room but is still
    being written, so a count may miss it. `lock` protects counting and making room. `looked_until`: no room could be
    made, so do not try before then; `room_at`: when there may be room."""

    held: Held = NOTHING
    coming: Held = NOTHING
    counted_at: float = -math.inf
    looked_until: float = -math.inf
    room_at: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Room:
    def __init__(
        self, kept: Keeps, max_number: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept = kept
        self._most = Held(max_number, max_bytes)
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}

    @asynccontextmanager
    async def taking(self, owner: str, num_bytes: int, number: int = 1) -> AsyncIterator[None]:
        """Reserve room for a write in the `with` body. A Conflict means that nothing was written; any other error, that
        it may have been.

        Raises:
            PagodaError: RATE_LIMITED if there is no room and none can be made, REQUEST_TOO_LARGE if there never is,
                what the store raises.
        """
        tenant, added = self._tenant(owner), Held(number, num_bytes)
        if num_bytes > self._most.num_bytes:
            message = f"{self._kept.what} may take {self._most.num_bytes} bytes each; this one takes {num_bytes}"
            raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, message)
        async with tenant.lock:
            is_old = self._clock() - tenant.counted_at >= times.TICKETS_FRESH_S
            if is_old and self._lacking(tenant, added) == NOTHING:
                await self._count(owner, tenant)
            if self._lacking(tenant, added) != NOTHING:
                await self._make_room(owner, tenant, added)
            tenant.coming = tenant.coming.plus(added)
        written = added
        try:
            yield
        except Conflict:
            written = NOTHING
            raise
        finally:
            tenant.coming, tenant.held = tenant.coming.minus(added), tenant.held.plus(written)

    def freed(self, owner: str, gone: Held = NOTHING) -> None:
        """`gone` was deleted here, or an entry may be forgotten from now on: the next request looks for room again."""
        if (tenant := self._tenants.get(owner)) is not None:
            tenant.held, tenant.looked_until = tenant.held.minus(gone), -math.inf

    def _tenant(self, owner: str) -> Tenant:
        if owner not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            self._tenants = {name: one for name, one in self._tenants.items() if one.lock.locked() or any(one.coming)}
        return self._tenants.setdefault(owner, Tenant())

    async def _count(self, owner: str, tenant: Tenant) -> None:
        tenant.held, tenant.counted_at = await self._kept.held_by(owner), self._clock()

    def _lacking(self, tenant: Tenant, added: Held) -> Held:
        """The room missing for `added`; an excess in a dimension to which nothing is added does not matter."""
        there = tenant.held.plus(tenant.coming)
        over = [held + more - most if more else 0 for held, more, most in zip(there, added, self._most, strict=True)]
        return Held(max(over[0], 0), max(over[1], 0))

    async def _make_room(self, owner: str, tenant: Tenant, added: Held) -> None:
        """Raises PagodaError RATE_LIMITED."""
        for _ in range(TRIES):
            if self._clock() < tenant.looked_until:
                break
            await self._count(owner, tenant)
            needed = self._lacking(tenant, added)
            if needed == NOTHING:
                return  # the last count was outdated, or another gateway has forgotten the same entries
            spare = Held(*(most // SPARE if lack else 0 for lack, most in zip(needed, self._most, strict=True)))
            gone, wait_s = await self._kept.forget_oldest(owner, needed, spare)
            if needed.within(gone):
                tenant.held = tenant.held.minus(gone)
                return
            if wait_s > 0.0:
                tenant.room_at = self._clock() + wait_s
                tenant.looked_until = min(tenant.room_at, self._clock() + times.TICKETS_FRESH_S)
        what = f"{self._most.number} {self._kept.what} of {self._most.num_bytes} bytes together"
        message = f"{what} are kept for a key at most, and those that are kept are running or have only just ended"
        raise PagodaError(ErrorCode.RATE_LIMITED, message, retry_after_s=max(1.0, tenant.room_at - self._clock()))
