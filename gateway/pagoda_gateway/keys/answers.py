"""Caches answers of the store; concurrent callers that ask for the same name share one lookup.

An answer is valid for `KEY_FRESH_S`. After that the store is asked again. While it does not answer, the last answer
stands for `stale_s`: one request waits `KEY_LOOKUP_S` for the store, later ones not at all. A negative answer does not
stand that long: a key made since must not be refused because the store is unreachable.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

MOST_KEPT = 65536
MOST_ABSENT = 4096  # names that strangers may make up
MOST_ASKING = 256  # concurrent lookups of names that strangers may have made up

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    """`error`: the lookup failed."""

    at: float
    value: T | None = None
    error: PagodaError | None = None


class Answers(Generic[T]):
    """`ask` looks up a name; it returns None if there is nothing, or raises PagodaError. `now` is a monotonic clock."""

    def __init__(
        self, ask: Callable[[str], Awaitable[T | None]], now: Callable[[], float], stale_s: float = times.KEY_STALE_S
    ) -> None:
        self._ask = ask
        self._now = now
        self._stale_s = stale_s
        self._kept: OrderedDict[str, _Answer[T]] = OrderedDict()
        self._absent: OrderedDict[str, _Answer[T]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[_Answer[T]]] = {}
        self._failed_at = -float("inf")  # when the store last failed, or was too slow
        self.began = False  # whether the store has ever answered

    async def of(self, name: str) -> T | None:
        """Raises PagodaError if the store does not answer and no recent answer stands."""
        known = self._kept.get(name) or self._absent.get(name)
        age_s = float("inf") if known is None else self._now() - known.at
        if known is not None and age_s < times.KEY_FRESH_S:
            return known.value
        stands = known if known is not None and known.value is not None and age_s < self._stale_s else None
        asking = self._asked(name)
        troubled = self._now() - self._failed_at < times.STORE_REST_MOST_S
        patience_s = 0.0 if troubled else times.KEY_LOOKUP_S
        await asyncio.wait([asking], timeout=None if stands is None else patience_s)
        answer = asking.result() if asking.done() else None
        if answer is None and not troubled:
            self._failed_at = self._now()
        if answer is not None and answer.error is None:
            return answer.value
        if stands is not None:
            return stands.value
        retry_after_s = 1.0 if answer is None or answer.error is None else answer.error.retry_after_s
        why = "API keys cannot be looked up now"
        raise PagodaError(ErrorCode.UNAVAILABLE, why, None, retry_after_s)

    def _asked(self, name: str) -> asyncio.Task[_Answer[T]]:
        """The one task that looks up this name; it continues if its waiters leave. Only lookups of unknown names are
        limited in number, so strangers cannot block those of known ones."""
        task = self._asking.get(name)
        if task is None:
            if len(self._asking) >= MOST_ASKING and name not in self._kept:
                raise PagodaError(ErrorCode.OVERLOADED, "too many API keys are being looked up", retry_after_s=1.0)
            task = self._asking[name] = asyncio.create_task(self._look_up(name), name="key-lookup")
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        return task

    async def _look_up(self, name: str) -> _Answer[T]:
        at = self._now()  # the answer is at least as recent as this
        try:
            answer = _Answer(at, await self._ask(name))
        except PagodaError as error:
            self._failed_at = self._now()
            return _Answer(at, error=error)
        self._failed_at = -float("inf")
        self.began = True
        self._kept.pop(name, None)
        self._absent.pop(name, None)
        kept, most = (self._absent, MOST_ABSENT) if answer.value is None else (self._kept, MOST_KEPT)
        kept[name] = answer
        if len(kept) > most:
            kept.popitem(last=False)
        return answer

    async def aclose(self) -> None:
        tasks = [*self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
