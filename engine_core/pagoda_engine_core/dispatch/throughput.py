"""Throughput of all workers together, from which admission estimates waiting times."""

from __future__ import annotations

WINDOW_S = 2.0
SHORT_WINDOW_S = 0.5
"""The same, when no work is left."""
RATE_WEIGHT = 0.5
"""Weight of the newest measurement in the moving average."""


class Throughput:
    """Prompt and output tokens per second of all workers together while there is work."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._num_tokens = 0
        self.tokens_per_s = 0.0  # 0: not measured yet

    def served(self, num_tokens: int, now: float, *, busy: bool) -> None:
        """Count a step; `busy` if work is left. The first step after a pause only starts the measurement."""
        if self._began_at is None:
            self._began_at, self._num_tokens = now, 0
        else:
            self._num_tokens += num_tokens
            age_s = now - self._began_at
            if age_s >= (WINDOW_S if busy else SHORT_WINDOW_S):
                rate = self._num_tokens / age_s
                self.tokens_per_s += (rate - self.tokens_per_s) * (RATE_WEIGHT if self.tokens_per_s else 1.0)
                self._began_at, self._num_tokens = now, 0
        if not busy:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Restart the measurement with the next step: the time until then says nothing about speed."""
        self._began_at = None

    def forgive(self, seconds: float, now: float) -> None:
        """Exclude a time in which we did not run."""
        if self._began_at is not None:
            self._began_at = min(self._began_at + seconds, now)
