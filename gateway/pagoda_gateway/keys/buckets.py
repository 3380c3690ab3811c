"""A token bucket that refills within a minute and may go into debt, because usage is known only afterwards.

A caller that finds too little is told how long to wait. Pure: `now` is any monotonic clock, in seconds.
"""

from __future__ import annotations

MINUTE_S = 60.0
ROUNDING = 1e-6  # so that a caller that has waited as told need not wait again


class Bucket:
    """`per_minute`, at least 1, is both its capacity and its refill per minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Below 0 while it is in debt."""
        if now > self._at:
            self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / MINUTE_S)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """A negative amount is given back."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available, if nothing is taken meanwhile; `amount` is at most the capacity."""
        short = amount - self.level(now)
        return short * MINUTE_S / self.per_minute if short > ROUNDING else 0.0

    def remaining(self, now: float) -> int:
        return max(0, int(self.level(now)))

    def reset_s(self, now: float) -> float:
        """Seconds until it is full."""
        return self.wait_s(self.per_minute, now)
