"""A store in memory that can fail or hang, and counts calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from pagoda_gateway.store.interface import unavailable
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore


class FlakyStore:
    """Implements `Store`. While `answers` is not set, calls hang."""

    def __init__(self) -> None:
        self._store = SqliteStore(MEMORY)
        self.gone = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Event()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            self.asked.set()
            await self.answers.wait()
            if self.gone:
                raise unavailable("gone", 2.5)
            return await real(*args, **kwargs)

        return call

    async def aclose(self) -> None:
        await self._store.aclose()
