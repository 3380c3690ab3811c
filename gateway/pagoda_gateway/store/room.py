"""What may be kept of a tenant, of one kind: counted in the store now and then, and in between by what was added here.

Where there is no room for one more, the oldest are forgotten that nobody is likely to ask for again; and where that
makes none, nothing is, and nobody tries again for a while. Several gateways may each add what there is room for in
between, so together they go over by that much at most.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

MAX_TENANTS = 4096  # that are remembered
SPARE = 256  # of so many parts one more is made room at a time, so that not every request has to
TRIES = 5  # as other gateways may forget the same ones at the same time


class Held(NamedTuple):
    """What an owner has of them together."""

    number: int
    num_bytes: int

    def plus(self, other: Held) -> Held:
        return Held(self.number + other.number, self.num_bytes + other.num_bytes)

    def within(self, other: Held) -> bool:
        return self.number <= other.number and self.num_bytes <= other.num_bytes


NOTHING = Held(0, 0)


class Keeps(Protocol):
    """`what`: how clients call several of them."""

    @property
    def what(self) -> str: ...

    async def held_by(self, owner: str) -> Held: ...

    async def forget_oldest(self, owner: str, needed: Held, spare: Held) -> tuple[Held, float]:
        """Delete what nobody is likely to ask for again, the oldest first, if that makes the room that is needed; and
        up to as much to spare.

        Returns:
            What was deleted; and where that is nothing, in how many seconds there might be room, at the soonest.
        """
        ...


@dataclass
class Tenant:
    """What one has, as it was counted and with what was added since. Under `lock` it is counted, and room is made.
    `looked_until`: there was no room to be made; `room_at`: when there may be."""

    held: Held = NOTHING
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

    async def take(self, owner: str, num_bytes: int, number: int = 1) -> None:
        """Raises PagodaError: RATE_LIMITED where there is no room and none can be made, REQUEST_TOO_LARGE where there
        never is, what the store raises."""
        tenant, added = self._tenant(owner), Held(number, num_bytes)
        if num_bytes > self._most.num_bytes:
            message = f"{self._kept.what} may take {self._most.num_bytes} bytes each; this one takes {num_bytes}"
            raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, message)
        async with tenant.lock:
            if self._clock() - tenant.counted_at >= times.TICKETS_FRESH_S:
                tenant.held, tenant.counted_at = await self._kept.held_by(owner), self._clock()
            if self._lacking(tenant, added) != NOTHING:
                await self._make_room(owner, tenant, added)
            tenant.held = tenant.held.plus(added)

    def _tenant(self, owner: str) -> Tenant:
        if owner not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            self._tenants = {name: tenant for name, tenant in self._tenants.items() if tenant.lock.locked()}
        return self._tenants.setdefault(owner, Tenant())

    def _lacking(self, tenant: Tenant, added: Held) -> Held:
        """Of what is added; what somebody is over the bound by in the other respect does not matter."""
        over = [
            held + more - most if more else 0 for held, more, most in zip(tenant.held, added, self._most, strict=True)
        ]
        return Held(max(over[0], 0), max(over[1], 0))

    async def _make_room(self, owner: str, tenant: Tenant, added: Held) -> None:
        """Raises PagodaError RATE_LIMITED."""
        for _ in range(TRIES):
            if self._clock() < tenant.looked_until:
                break
            needed = self._lacking(tenant, added)
            spare = Held(*(most // SPARE if lack else 0 for lack, most in zip(needed, self._most, strict=True)))
            gone, wait_s = await self._kept.forget_oldest(owner, needed, spare)
            if needed.within(gone):
                tenant.held = Held(tenant.held.number - gone.number, tenant.held.num_bytes - gone.num_bytes)
                return
            if wait_s > 0.0:
                tenant.room_at = self._clock() + wait_s
                tenant.looked_until = min(tenant.room_at, self._clock() + times.TICKETS_FRESH_S)
            tenant.held, tenant.counted_at = await self._kept.held_by(owner), self._clock()
            if self._lacking(tenant, added) == NOTHING:
                return  # another gateway forgot the same ones, or it was not as it was thought to be
        what = f"{self._most.number} {self._kept.what} of {self._most.num_bytes} bytes together"
        message = f"{what} are kept for a key at most, and those that are kept run or have only just ended"
        raise PagodaError(ErrorCode.RATE_LIMITED, message, retry_after_s=max(1.0, tenant.room_at - self._clock()))
