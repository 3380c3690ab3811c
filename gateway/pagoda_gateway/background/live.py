"""The events of a response that runs here, for those who follow it: they are shown when they are in the store.

What a client was shown it may come back for by number, to another gateway, which knows only what is in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

MOST_EVENTS = 1024  # kept here; who follows more slowly reads the store


class LiveEvents:
    """The last of those that are in the store, from number `begin` on."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.events: list[bytes] = []
        self.over = False  # it runs here no more
        self.ended = False  # .. for there are no more
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
