"""How much all workers together bring to an end in a second, from which admission reckons how long somebody waits."""

from __future__ import annotations

WINDOW_S = 2.0
SHORT_WINDOW_S = 0.5
"""Where nothing more is to be done."""
RATE_WEIGHT = 0.5
"""Of the newest measurement in the average."""


class Throughput:
    """Tokens a second, prompt and output, of all workers together while there is work."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._num_tokens = 0
        self.tokens_per_s = 0.0  # 0: not measured yet

    def served(self, num_tokens: int, now: float, *, busy: bool) -> None:
        """A step is done; `busy` if there is more to do. The first one after a pause only starts the measurement."""
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
        """The time until the next step says nothing of speed."""
        self._began_at = None

    def forgive(self, seconds: float, now: float) -> None:
        """So much time has passed in which we did not run: it says nothing of speed either."""
        if self._began_at is not None:
            self._began_at = min(self._began_at + seconds, now)
