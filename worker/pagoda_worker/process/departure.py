"""A worker asked to end leaves when it has no rows, when it is dismissed, or when its drain timeout has passed."""

from __future__ import annotations

import threading


class Departure:
    """Decides when this process leaves. A signal sets `asked`; the engine core may dismiss it from any thread.

    Without a dismissal it leaves `drain_timeout_s` after it first noticed the request.
    """

    def __init__(self, asked: threading.Event, drain_timeout_s: float) -> None:
        self._asked = asked
        self._drain_timeout_s = drain_timeout_s
        self._dismissed = threading.Event()
        self._since: float | None = None

    @property
    def announced(self) -> bool:
        """Whether it takes nothing new."""
        return self._asked.is_set() or self._dismissed.is_set()

    @property
    def reason(self) -> str:
        return "drained" if self._dismissed.is_set() else "stopped"

    def dismiss(self) -> None:
        """The engine core has nothing left for it to do."""
        self._dismissed.set()

    def due(self, now: float, num_rows: int) -> bool:
        """Whether to leave now, with `num_rows` rows left. `now` is any monotonic clock, always of the same thread."""
        if self._dismissed.is_set():
            return True
        if not self._asked.is_set():
            return False
        self._since = now if self._since is None else self._since
        return not num_rows or now - self._since >= self._drain_timeout_s
