"""What a tenant's tickets may take: counted in the store now and then, and in between by what was added here.

Where there is no room for one more, the oldest are forgotten that nobody is likely to ask for again. Several gateways
may each add what there is room for in between, so together they go over by that much at most.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagoda_gateway.store.tickets import NOTHING, Held, KeptTickets
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

MAX_TENANTS = 4096  # that are remembered
SPARE = 64  # of so many parts one is made room at a time, so that not every request has to


@dataclass
class Tenant:
    """What one has, as it was counted and with what was added since. Under `lock` it is counted, and room is made."""

    held: Held = NOTHING
    counted_at: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class TicketRoom:
    def __init__(
        self, kept: KeptTickets, max_number: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept = kept
        self._most = Held(max_number, max_bytes)
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}

    async def take(self, owner: str, num_bytes: int, number: int = 1) -> None:
        """Raises PagodaError: RATE_LIMITED where there is no room and none can be made, what the store raises."""
        if owner not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            self._tenants.clear()
        tenant, added = self._tenants.setdefault(owner, Tenant()), Held(number, num_bytes)
        async with tenant.lock:
            if self._clock() - tenant.counted_at >= times.TICKETS_FRESH_S:
                tenant.held, tenant.counted_at = await self._kept.held_by(owner), self._clock()
            if not tenant.held.plus(added).within(self._most):
                await self._make_room(owner, tenant, added)
            tenant.held = tenant.held.plus(added)

    async def _make_room(self, owner: str, tenant: Tenant, added: Held) -> None:
        number, num_bytes = self._most
        target = Held(number - number // SPARE - added.number, num_bytes - num_bytes // SPARE - added.num_bytes)
        held, wait_s = await self._kept.forget_oldest(owner, target)
        tenant.held, tenant.counted_at = held, self._clock()
        if not held.plus(added).within(self._most):
            what = f"{number} requests with an Idempotency-Key of {num_bytes} bytes together"
            message = f"{what} are kept for a key at most, and those that are kept run or have only just ended"
            raise PagodaError(ErrorCode.RATE_LIMITED, message, retry_after_s=wait_s)
