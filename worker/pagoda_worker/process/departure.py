"""A worker that was asked to end finishes what nobody else takes: it leaves with empty hands, dismissed, or late."""

from __future__ import annotations

import threading


class Departure:
    """When this process goes. `asked` is set by a signal; the engine core dismisses from any thread.

    It goes by itself `drain_timeout_s` after it was first seen to be asked.
    """

    def __init__(self, asked: threading.Event, drain_timeout_s: float) -> None:
        self._asked = asked
        self._drain_timeout_s = drain_timeout_s
        self._dismissed = threading.Event()
        self._since: float | None = None

    @property
    def announced(self) -> bool:
        """It takes nothing new."""
        return self._asked.is_set() or self._dismissed.is_set()

    @property
    def reason(self) -> str:
        return "drained" if self._dismissed.is_set() else "stopped"

    def dismiss(self) -> None:
        """The engine core has nothing left for it to do."""
        self._dismissed.set()

    def due(self, now: float, num_rows: int) -> bool:
        """Whether it is to go now, holding so many rows. `now` is any monotonic clock, of one thread."""
        if self._dismissed.is_set():
            return True
        if not self._asked.is_set():
            return False
        self._since = now if self._since is None else self._since
        return not num_rows or now - self._since >= self._drain_timeout_s
