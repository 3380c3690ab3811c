"""A circuit breaker: calls to a slow or lost store fail in bounded time, and nearly always at once.

Each call has a time budget. A call that fails opens the circuit: all calls are refused for a while, then one is let
through as a probe while the others are still refused. So a store that hangs delays only one call now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from pagoda_gateway.store.interface import Conflict, Full, Page, Record, Store, Unreadable, unavailable
from pagoda_proto import times
from pagoda_proto.errors import PagodaError

logger = logging.getLogger(__name__)

T = TypeVar("T")
OUTCOMES = ("answered", "full", "failed", "late", "refused")


class Circuit:
    """Decides when the store may be called. Pure: `now` is any monotonic clock."""

    def __init__(self, rest_s: float, rest_most_s: float) -> None:
        self._rest_s = self._first_s = rest_s
        self._most_s = rest_most_s
        self._closed_until = 0.0
        self._failing = False
        self._trying = False

    @property
    def failing(self) -> bool:
        return self._failing

    def wait_s(self, now: float) -> float:
        """0 if the store may be called now; the caller must then call `ended`, whatever happens."""
        if not self._failing:
            return 0.0
        if now < self._closed_until:
            return self._closed_until - now
        if self._trying:
            return self._first_s
        self._trying = True
        return 0.0

    def ended(self, now: float, *, well: bool | None) -> None:
        """`well`: None if the outcome is unknown because the caller was cancelled."""
        self._trying = False
        if well:
            self._failing, self._rest_s = False, self._first_s
        elif well is False:
            already_resting = self._failing and now < self._closed_until
            if not already_resting:
                self._closed_until = now + self._rest_s
                self._rest_s = min(2 * self._rest_s, self._most_s)
            self._failing = True


class GuardedStore:
    """Implements `Store` on top of another one. `on_outcome` receives one of OUTCOMES for every call."""

    def __init__(
        self,
        store: Store,
        on_outcome: Callable[[str], None] = lambda outcome: None,
        *,
        budget_s: float = times.STORE_CALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._on_outcome = on_outcome
        self._budget_s = budget_s
        self._clock = clock
        self._circuit = Circuit(times.STORE_REST_S, times.STORE_REST_MOST_S)

    @property
    def failing(self) -> bool:
        """Whether the last known outcome was a failure."""
        return self._circuit.failing

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        wait_s = self._circuit.wait_s(self._clock())
        if wait_s:
            self._on_outcome("refused")
            raise unavailable("the circuit is open", wait_s)
        outcome = why = ""  # stays unknown if the caller is cancelled
        try:
            async with asyncio.timeout(self._budget_s):
                result = await call()
            outcome = "answered"
            return result
        except TimeoutError:
            outcome, why = "late", f"no answer within {self._budget_s:g} s"
            raise unavailable(why, times.STORE_REST_S) from None
        except (Conflict, ValueError, Unreadable):
            outcome = "answered"
            raise
        except Full as error:
            outcome, why = "full", "; ".join(error.__notes__)
            raise
        except PagodaError as error:
            outcome, why = "failed", "; ".join(error.__notes__)
            raise
        finally:
            self._end(outcome, why)

    def _end(self, outcome: str, why: str) -> None:
        was_failing = self._circuit.failing
        self._circuit.ended(self._clock(), well=None if not outcome else outcome in ("answered", "full"))
        if outcome:
            self._on_outcome(outcome)
        if self._circuit.failing and not was_failing:
            logger.warning("the store cannot be used: %s", why)
        elif was_failing and not self._circuit.failing:
            logger.warning("the store is back")

    async def get(self, collection: str, key: str) -> Record | None:
        return await self._call(partial(self._store.get, collection, key))

    async def put(
        self,
        collection: str,
        key: str,
        value: bytes,
        *,
        owner: str = "",
        expect: int | None = None,
        expires_at: float | None = None,
    ) -> int:
        put = partial(self._store.put, collection, key, value, owner=owner, expect=expect, expires_at=expires_at)
        return await self._call(put)

    async def delete(self, collection: str, key: str, *, expect: int | None = None) -> bool:
        return await self._call(partial(self._store.delete, collection, key, expect=expect))

    async def page(
        self, collection: str, owner: str, *, limit: int, after: int | None = None, newest_first: bool = True
    ) -> Page:
        page = partial(self._store.page, collection, owner, limit=limit, after=after, newest_first=newest_first)
        return await self._call(page)

    async def append(
        self, log: str, parts: Sequence[bytes], *, index: int | None = None, expires_at: float | None = None
    ) -> int:
        return await self._call(partial(self._store.append, log, parts, index=index, expires_at=expires_at))

    async def read(self, log: str, start: int = 0) -> list[bytes]:
        return await self._call(partial(self._store.read, log, start))

    async def length(self, log: str) -> int:
        return await self._call(partial(self._store.length, log))

    async def keep_until(self, log: str, expires_at: float | None) -> None:
        await self._call(partial(self._store.keep_until, log, expires_at))

    async def drop(self, log: str) -> None:
        await self._call(partial(self._store.drop, log))

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        return await self._call(partial(self._store.claim, name, holder, lease_s))

    async def release(self, name: str, holder: str) -> None:
        await self._call(partial(self._store.release, name, holder))

    async def aclose(self) -> None:
        await self._store.aclose()
