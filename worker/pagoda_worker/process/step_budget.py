"""How many tokens a step may compute: what was configured, less after memory ran out, more again as time goes by."""

from __future__ import annotations

from pagoda_proto import times

MIN_TOKENS = 64  # a step so small that memory is short for other reasons


class StepBudget:
    """`most` is what was configured, `least` what a step can never do without; `now` any monotonic clock."""

    def __init__(self, most: int, least: int = MIN_TOKENS) -> None:
        self._most = most
        self._least = min(least, most)
        self._reduced = most
        self._since = 0.0

    def offered(self, now: float) -> int:
        """Tokens a step may have; twice as many after every while without a lack of memory."""
        doublings = min(64, max(0, int((now - self._since) / times.BUDGET_RESTORE_S)))
        return min(self._most, self._reduced << doublings)

    def ran_out(self, now: float) -> None:
        """Memory was short in a step."""
        self._reduced = max(self._least, self.offered(now) // 2)
        self._since = now
