"""Predicts how long a worker takes for a step from how long it took for steps of that size, by this process's clock.

Sizes are classed by powers of two: a step of a few tokens costs nearly as much as a step of one, so a rate measured at
one size says little about another. A size not seen yet takes at most as long as the next larger one seen, and at most
as long as the next smaller one times the ratio.

This predicts when a worker will need its next step, which need not be planned sooner: requests that arrive until then
are in it, instead of waiting for the step after.
"""

from __future__ import annotations

import math
from collections import deque

from pagoda_proto.times import STEP_DEADLINE_FACTOR, STEP_DEADLINE_LEAST_S

WEIGHT = 0.2
"""Weight of the newest measurement in the moving average."""
FIRST_STEPS = 8
"""The first steps of a life may take as long as the configuration allows: they also prepare what they compute."""
LEAD_SHARE, LEAST_LEAD_S = 0.25, 0.005
"""How long before the steps in flight end the next one is sent, besides twice the round-trip time: steps of one size
vary in duration, and the worker has to read the plan."""


class Pace:
    """Tracks the steps sent to a worker and their results, in order. Times are the caller's."""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, float | None]] = deque()  # time None: unknown, as we did not run for a while
        self._answered_at = 0.0
        self._seconds: dict[int, float] = {}  # by the number of bits of a step's tokens
        self._trip_s: float | None = None  # round trip to an idle worker
        self.num_steps = 0  # observed so far

    def asked(self, num_tokens: int, now: float) -> None:
        """Note that a step was sent. It starts when those before it are done."""
        self._asked.append((num_tokens, now))

    def answered(self, now: float, worked_s: float = 0.0) -> tuple[int, float]:
        """Note that the oldest step is done. Returns its tokens and how long it ran, 0 if unknown. `worked_s` is the
        worker's own measurement."""
        num_tokens, asked_at = self._asked.popleft()
        seconds = 0.0 if asked_at is None else max(0.0, now - max(asked_at, self._answered_at))
        if asked_at is not None and asked_at >= self._answered_at:
            self._travelled(max(0.0, seconds - worked_s))
        self._answered_at = now
        if num_tokens and seconds:
            self.observe(num_tokens, seconds)
        return num_tokens, seconds

    def _travelled(self, trip_s: float) -> None:
        """Adopt a shorter round trip at once. A longer one was delayed, but it may be all that is known for long."""
        known = self._trip_s
        self._trip_s = trip_s if known is None or trip_s < known else known + (trip_s - known) * WEIGHT

    def next_at(self) -> float:
        """When to send one more step so that the worker need not wait for it; 0, which is past, if unknown."""
        asked_at = self._asked[0][1] if self._asked else None
        if asked_at is None or self._trip_s is None:
            return 0.0
        needed_s = sum(self.step_s(num_tokens) for num_tokens, _ in self._asked)
        lead_s = 2 * self._trip_s + max(LEAST_LEAD_S, LEAD_SHARE * needed_s)
        return max(asked_at, self._answered_at) + needed_s - lead_s

    def forgive(self) -> None:
        """We did not run for a while, so the durations of the steps in flight are unknown."""
        self._asked = deque((num_tokens, None) for num_tokens, _ in self._asked)

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        known = self._seconds.get(size)
        self._seconds[size] = seconds if known is None else known + (seconds - known) * WEIGHT
        self.num_steps += 1

    def step_s(self, num_tokens: int) -> float:
        """About how long a step of `num_tokens` takes; 0 while nothing is known, and if it only drops rows."""
        if not num_tokens:
            return 0.0
        size = num_tokens.bit_length()
        if size in self._seconds:
            return self._seconds[size]
        smaller = max((known for known in self._seconds if known < size), default=None)
        larger = min((known for known in self._seconds if known > size), default=None)
        bounds = [] if larger is None else [self._seconds[larger]]
        if smaller is not None:
            bounds.append(self._seconds[smaller] * 2 ** (size - smaller))
        return min(bounds, default=0.0)

    def deadline_s(self, num_tokens: int) -> float:
        """After how long such a step counts as hung; `inf` while too little is known."""
        if self.num_steps < FIRST_STEPS:
            return math.inf
        return max(STEP_DEADLINE_LEAST_S, STEP_DEADLINE_FACTOR * self.step_s(num_tokens))
