"""Other threads post calls; the loop thread, the only one that changes state, makes them between two passes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pagoda_proto.errors import ErrorCode, PagodaError

T = TypeVar("T")


class Inbox:
    """Calls for the loop thread, which `wake` wakes up."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._items: deque[Callable[[float], None]] = deque()
        self._lock = threading.Lock()
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def post(self, item: Callable[[float], None]) -> bool:
        """Have `item` called with the time. Any thread; False if the inbox is closed."""
        with self._lock:
            if self.closed:
                return False
            self._items.append(item)
            self._wake()  # under the lock: once closed, its file descriptor may be reused
        return True

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called. Any thread; the future raises PagodaError UNAVAILABLE if the inbox is closed."""
        future: Future[T] = Future()
        if not self.post(lambda _: _resolve(future, function)):
            future.set_exception(stopped())
        return future

    def close(self) -> bool:
        """Take no more calls; False if it was closed already."""
        with self._lock:
            was_open, self.closed = not self.closed, True
        return was_open

    def drain(self, now: float) -> bool:
        """Make the calls posted so far; whether there were any."""
        count = len(self._items)  # calls posted meanwhile wait for the next pass
        for _ in range(count):
            self._items.popleft()(now)
        return count > 0


def stopped() -> PagodaError:
    return PagodaError(ErrorCode.UNAVAILABLE, "the engine core has stopped")


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - it is the caller's to see
        future.set_exception(error)
