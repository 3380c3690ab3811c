"""How long a worker takes for a step of a size is what it has taken for such steps, by our own clock.

Sizes are told apart by powers of two: a step of few tokens costs nearly what a step of one does, so a rate measured on
one size says little of another. Between sizes that were seen a step takes no longer than the next larger one, nor than
the next smaller one times the ratio.
"""

from __future__ import annotations

from collections import deque

WEIGHT = 0.2
"""Of the newest measurement in the average."""
WINDOW_S = 2.0
SHORT_WINDOW_S = 0.5
RATE_WEIGHT = 0.5


class Pace:
    """What is asked of a worker and answered, in order. Times are the caller's."""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, float | None]] = deque()  # None: a stretch in which we did not run hides it
        self._answered_at = 0.0
        self._seconds: dict[int, float] = {}  # by the number of bits of a step's tokens
        self.num_steps = 0

    def asked(self, num_tokens: int, now: float) -> None:
        """A step was sent. It runs once those before it are answered."""
        self._asked.append((num_tokens, now))

    def answered(self, now: float) -> tuple[int, float]:
        """The oldest step is done: its tokens, and how long it ran; 0 where that is not known."""
        num_tokens, asked_at = self._asked.popleft()
        seconds = 0.0 if asked_at is None else max(0.0, now - max(asked_at, self._answered_at))
        self._answered_at = now
        if num_tokens and seconds:
            self.observe(num_tokens, seconds)
        return num_tokens, seconds

    def forgive(self) -> None:
        """We did not run for a while: how long it takes what is under way is not known."""
        self._asked = deque((num_tokens, None) for num_tokens, _ in self._asked)

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        known = self._seconds.get(size)
        self._seconds[size] = seconds if known is None else known + (seconds - known) * WEIGHT
        self.num_steps += 1

    def step_s(self, num_tokens: int) -> float:
        """How long a step of so many tokens takes, about; 0 while nothing is known."""
        size = num_tokens.bit_length()
        if size in self._seconds:
            return self._seconds[size]
        smaller = max((known for known in self._seconds if known < size), default=None)
        larger = min((known for known in self._seconds if known > size), default=None)
        bounds = [] if larger is None else [self._seconds[larger]]
        if smaller is not None:
            bounds.append(self._seconds[smaller] * 2 ** (size - smaller))
        return min(bounds, default=0.0)


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
        if not busy:  # the time until the next step says nothing of speed
            self._began_at = None

    def forgive(self, seconds: float, now: float) -> None:
        """So much time has passed in which we did not run: it says nothing of speed either."""
        if self._began_at is not None:
            self._began_at = min(self._began_at + seconds, now)
