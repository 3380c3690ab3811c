"""What a tenant's tickets may take: counted in the store now and then, and in between by what was added here.

Several gateways may each add what there is room for in between, so together they go over by that much at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pagoda_gateway.store.tickets import Held, KeptTickets
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

MAX_TENANTS = 4096  # that are remembered


class TicketRoom:
    def __init__(
        self, kept: KeptTickets, max_number: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept = kept
        self._most = Held(max_number, max_bytes)
        self._clock = clock
        self._held: dict[str, tuple[float, Held]] = {}

    async def take(self, owner: str, num_bytes: int, number: int = 1) -> None:
        """Raises PagodaError: RATE_LIMITED where there is no room, what the store raises."""
        counted_at, held = self._held.get(owner, (-times.TICKETS_FRESH_S, Held(0, 0)))
        if self._clock() - counted_at >= times.TICKETS_FRESH_S:
            counted_at, held = self._clock(), await self._kept.held_by(owner)
        held = Held(held.number + number, held.num_bytes + num_bytes)
        if held.number > self._most.number or held.num_bytes > self._most.num_bytes:
            what = f"{self._most.number} requests with an Idempotency-Key of {self._most.num_bytes} bytes together"
            message = f"{what} are kept for a key at most; they are forgotten by and by"
            raise PagodaError(ErrorCode.RATE_LIMITED, message, retry_after_s=times.TICKETS_FRESH_S)
        if len(self._held) >= MAX_TENANTS:
            self._held.clear()
        self._held[owner] = counted_at, held
