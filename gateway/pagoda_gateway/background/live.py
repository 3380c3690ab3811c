"""The events of a response that runs here, as far as they were told, for those who follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pagoda_gateway.store.interface import Conflict


class LiveEvents:
    """Those from number `begin` on; what was told before is in the store, and not here any more."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.events: list[bytes] = []
        self.over = False
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        return self.begin + len(self.events)

    def add(self, event: bytes) -> None:
        self.events.append(event)
        self._tell()

    def forget(self, num_events: int) -> None:
        """The first ones are in the store now. Raises Conflict where it has others than these."""
        if not 0 <= num_events <= len(self.events):
            raise Conflict
        del self.events[:num_events]
        self.begin += num_events

    def close(self) -> None:
        self.over = True
        self._tell()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """From number `start` on as they come, to the last, or to one that is in the store only."""
        while start >= self.begin:
            changed = self._changed
            if start < self.end:
                yield self.events[start - self.begin]
                start += 1
            elif self.over:
                return
            else:
                await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
