"""Other threads ask by posting; the one thread that may change things does what was posted, between two passes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pagoda_proto.errors import ErrorCode, PagodaError

T = TypeVar("T")


class Inbox:
    """`wake` has the thread that owns it come round."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._items: deque[Callable[[float], None]] = deque()
        self._lock = threading.Lock()
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def post(self, item: Callable[[float], None]) -> bool:
        """Have `item` called with the time. Any thread; False when nobody will."""
        with self._lock:
            if self.closed:
                return False
            self._items.append(item)
            self._wake()  # in here: once we are closed, what it writes to may be somebody else's
        return True

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called. Any thread; the future raises PagodaError UNAVAILABLE when nobody will."""
        future: Future[T] = Future()
        if not self.post(lambda _: _resolve(future, function)):
            future.set_exception(stopped())
        return future

    def close(self) -> bool:
        """Take nothing any more; False when that was so already."""
        with self._lock:
            was_open, self.closed = not self.closed, True
        return was_open

    def drain(self, now: float) -> bool:
        """Do what was posted until now; whether there was anything."""
        count = len(self._items)  # what is posted meanwhile has to wait for the next pass
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
