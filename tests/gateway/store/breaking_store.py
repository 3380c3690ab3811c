"""A store that breaks off at one of its calls, in each of the ways in which that can happen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from typing import Any

from pagoda_gateway.store.interface import Full, Store, unavailable

WRITES = ("put", "append")


class How(StrEnum):
    KILLED_BEFORE = "the process is killed before the call"
    KILLED_AFTER = ".. or when it was done"
    CANCELLED = "whoever called is cancelled"
    CANCELLED_OFTEN = ".. and again at every call that is still made"
    LOST = "the call is done, and its answer does not come"
    TWO_LOST = ".. and the next call fails"
    FULL = "from this call on there is no room"
    FULL_ONCE = ".. or for this call only"


class Breaking:
    """Implements `Store`. Calls are counted from 1; `logs` are those that were ever written to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.logs: set[str] = set()
        self.num_calls = 0
        self.at = -1  # the call; -1: none
        self.how = How.KILLED_BEFORE
        self.broken = False

    def break_at(self, number: int, how: How) -> None:
        self.num_calls, self.at, self.how, self.broken = 0, number, how, False

    def mend(self) -> None:
        self.num_calls, self.at, self.broken = 0, -1, False

    async def during(self, work: Coroutine[Any, Any, Any], number: int, how: How) -> tuple[Any, bool]:
        """Run work that breaks off at that call: its result or failure, and whether that call was reached."""
        task = asyncio.ensure_future(work)
        self.leave = task.cancel  # type: ignore[method-assign]
        self.break_at(number, how)
        (said,) = await asyncio.gather(task, return_exceptions=True)
        broken = self.broken
        self.mend()
        return said, broken

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if name == "append":
                self.logs.add(args[0])
            now = self.num_calls == self.at
            self.broken = self.broken or now
            if self.broken and self.how is How.KILLED_BEFORE:
                raise Killed
            if self.broken and self.how is How.KILLED_AFTER and not now:
                raise Killed
            if self.how is How.TWO_LOST and self.num_calls == self.at + 1:
                raise unavailable("as the test wants it", 1.0)
            if name in WRITES and (now if self.how is How.FULL_ONCE else self.broken and self.how is How.FULL):
                raise Full("as the test wants it")
            if now if self.how is How.CANCELLED else self.broken and self.how is How.CANCELLED_OFTEN:
                asyncio.get_running_loop().call_soon(self.leave)
            result = await real(*args, **kwargs)
            if now and self.how is How.KILLED_AFTER:
                raise Killed
            if now and self.how in (How.LOST, How.TWO_LOST):
                raise unavailable("as the test wants it", 1.0)
            return result

        return call

    def leave(self) -> None:
        """Tests replace this with the cancellation of a task."""


class Interleaved(Breaking):
    """Runs `meanwhile` just after the first call with this name and first argument."""

    def __init__(self, store: Store, call: str, what: str, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(store)
        self._awaited, self._meanwhile, self._done = (call, what), meanwhile, False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        real: Callable[..., Awaitable[object]] = super().__getattr__(name)

        async def call(*args: str, **kwargs: object) -> object:
            result = await real(*args, **kwargs)
            if not self._done and (name, args[0]) == self._awaited:
                self._done = True
                await self._meanwhile()
            return result

        return call


class Killed(BaseException):
    """The caller's process is dead: it does nothing more."""
