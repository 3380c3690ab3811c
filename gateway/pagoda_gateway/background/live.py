"""The events of a response that runs here, for the clients that follow it: they see an event once the store has it.

A client may come back for the events after a number it has seen, to another gateway, which knows only the store's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

MOST_EVENTS = 1024  # kept in memory; slower followers read the store


class LiveEvents:
    """The latest events in the store, from number `begin` on."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.events: list[bytes] = []
        self.over = False  # the response no longer runs here ..
        self.ended = False  # .. because it has ended
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        return self.begin + len(self.events)

    def add(self, events: Sequence[bytes]) -> None:
        self.events += events
        too_many = max(0, len(self.events) - MOST_EVENTS)
        del self.events[:too_many]
        self.begin += too_many
        self._tell()

    def close(self, *, ended: bool) -> None:
        self.over, self.ended = True, ended
        self._tell()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """Yield events from number `start` on as they come, until the last, or until the next is only in the store."""
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
