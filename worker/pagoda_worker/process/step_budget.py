"""How many tokens a step may compute: as configured, halved whenever memory runs out, and restored over time."""

from __future__ import annotations

from pagoda_proto import times

MIN_TOKENS = 64  # below this, memory is short for other reasons


class StepBudget:
    """`most` is the configured number, `least` what a step cannot do without; `now` is any monotonic clock."""

    def __init__(self, most: int, least: int = MIN_TOKENS) -> None:
        self._most = most
        self._least = min(least, most)
        self._reduced = most
        self._since = 0.0

    def offered(self, now: float) -> int:
        """Tokens a step may have; doubles after each BUDGET_RESTORE_S without running out of memory."""
        doublings = min(64, max(0, int((now - self._since) / times.BUDGET_RESTORE_S)))
        return min(self._most, self._reduced << doublings)

    def ran_out(self, now: float) -> None:
        """A step ran out of memory."""
        self._reduced = max(self._least, self.offered(now) // 2)
        self._since = now
