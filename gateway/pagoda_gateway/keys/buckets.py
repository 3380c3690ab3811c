"""A bucket is full after a minute without use, and may be owed: what is taken is known only afterwards.

Who finds it short is told after how long it will not be. Pure: `now` is any monotonic clock, in seconds.
"""

from __future__ import annotations

MINUTE_S = 60.0
ROUNDING = 1e-6  # who waited for as long as told is not told to wait again


class Bucket:
    """`per_minute` is what it holds, and what flows into it in a minute; at least 1."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Below 0 for as long as more was taken than had flowed in."""
        if now > self._at:
            self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / MINUTE_S)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """What is negative is given back."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """How long until there is so much, if nothing is taken meanwhile; `amount` is at most what it holds."""
        short = amount - self.level(now)
        return short * MINUTE_S / self.per_minute if short > ROUNDING else 0.0

    def remaining(self, now: float) -> int:
        return max(0, int(self.level(now)))

    def reset_s(self, now: float) -> float:
        """How long until it is full."""
        return self.wait_s(self.per_minute, now)
