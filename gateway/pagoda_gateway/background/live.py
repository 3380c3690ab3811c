"""The events of a response that runs here, as far as they were told, for those who follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class LiveEvents:
    """Numbered from `begin` on: what was told before is in the store."""

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

    def close(self) -> None:
        self.over = True
        self._tell()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """From number `start` on, which is `begin` or later, as they come."""
        while True:
            changed = self._changed
            for event in self.events[start - self.begin :]:
                yield event
                start += 1
            if self.over and start >= self.end:
                return
            if start >= self.end:
                await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
