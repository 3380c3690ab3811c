"""How long a worker takes for a step of a size is what it has taken for such steps, by our own clock.

Sizes are told apart by powers of two: a step of few tokens costs nearly what a step of one does, so a rate measured on
one size says little of another. Between sizes that were seen a step takes no longer than the next larger one, nor than
the next smaller one times the ratio.

So it is known when a worker will need its next step, and that need not be planned sooner: who comes until then is in
it, and does not wait for the one after.
"""

from __future__ import annotations

import math
from collections import deque

from pagoda_proto.times import STEP_DEADLINE_FACTOR, STEP_DEADLINE_LEAST_S

WEIGHT = 0.2
"""Of the newest measurement in the average."""
FIRST_STEPS = 8
"""So many steps of a life may take as long as the configuration says: what they compute first they also prepare."""
LEAD_SHARE, LEAST_LEAD_S = 0.25, 0.005
"""How long before the end of the step under way the next one is asked for, beside twice the time on the way: steps of
one size do not all take the same time, and the worker has to read what it is asked."""


class Pace:
    """What is asked of a worker and answered, in order. Times are the caller's."""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, float | None]] = deque()  # None: a stretch in which we did not run hides it
        self._answered_at = 0.0
        self._seconds: dict[int, float] = {}  # by the number of bits of a step's tokens
        self._trip_s: float | None = None  # there and back, when the worker had nothing else to do
        self.num_steps = 0  # that were observed

    def asked(self, num_tokens: int, now: float) -> None:
        """A step was sent. It runs once those before it are answered."""
        self._asked.append((num_tokens, now))

    def answered(self, now: float, worked_s: float = 0.0) -> tuple[int, float]:
        """The oldest step is done: its tokens, and how long it ran; 0 where that is not known. `worked_s` is what the
        worker says of it."""
        num_tokens, asked_at = self._asked.popleft()
        seconds = 0.0 if asked_at is None else max(0.0, now - max(asked_at, self._answered_at))
        if asked_at is not None and asked_at >= self._answered_at:
            self._travelled(max(0.0, seconds - worked_s))
        self._answered_at = now
        if num_tokens and seconds:
            self.observe(num_tokens, seconds)
        return num_tokens, seconds

    def _travelled(self, trip_s: float) -> None:
        """What is too long was held up by something else, and may be all there is to know for long."""
        known = self._trip_s
        self._trip_s = trip_s if known is None or trip_s < known else known + (trip_s - known) * WEIGHT

    def next_at(self) -> float:
        """When to ask for one step more, so that the worker need not wait for it; long ago, if that is not known."""
        asked_at = self._asked[0][1] if self._asked else None
        if asked_at is None or self._trip_s is None:
            return 0.0
        needed_s = sum(self.step_s(num_tokens) for num_tokens, _ in self._asked)
        lead_s = 2 * self._trip_s + max(LEAST_LEAD_S, LEAD_SHARE * needed_s)
        return max(asked_at, self._answered_at) + needed_s - lead_s

    def forgive(self) -> None:
        """We did not run for a while: how long it takes what is under way is not known."""
        self._asked = deque((num_tokens, None) for num_tokens, _ in self._asked)

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        known = self._seconds.get(size)
        self._seconds[size] = seconds if known is None else known + (seconds - known) * WEIGHT
        self.num_steps += 1

    def step_s(self, num_tokens: int) -> float:
        """How long a step of so many tokens takes, about; 0 while nothing is known, and if it only drops rows."""
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
        """After how long such a step is hung; `inf` while too little is known."""
        if self.num_steps < FIRST_STEPS:
            return math.inf
        return max(STEP_DEADLINE_LEAST_S, STEP_DEADLINE_FACTOR * self.step_s(num_tokens))
