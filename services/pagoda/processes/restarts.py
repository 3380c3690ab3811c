"""How soon a child is restarted: the time it lived counts towards the pause.

So a child that works and is killed now and then is back at once, however often that happens; one that crashes as soon
as it is up is restarted at most every `most_s`; and one that fails by itself before it is up waits longer each time,
because the cause must be fixed from outside.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from pagoda_proto import times

CRASH_LOOP = 5  # from this many consecutive deaths on, each is reported as a crash loop


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Seconds before a restart. Both pauses double with every consecutive death, up to their maximum."""

    first_s: float = times.RESTART_FIRST_S
    most_s: float = times.RESTART_MOST_S
    never_up_first_s: float = times.RESTART_NEVER_UP_FIRST_S
    never_up_most_s: float = times.RESTART_NEVER_UP_MOST_S

    def of_one_that_was_up(self, deaths_in_a_row: int, lived_s: float) -> float:
        return max(0.0, _doubled(self.first_s, deaths_in_a_row, self.most_s) - lived_s)

    def of_one_that_failed(self, failures_in_a_row: int) -> float:
        return _doubled(self.never_up_first_s, failures_in_a_row, self.never_up_most_s)


def _doubled(first_s: float, count: int, most_s: float) -> float:
    return min(most_s, first_s * 2.0 ** min(count - 1, 64))


@dataclass
class Lives:
    """The lives of one child so far. Times are seconds of any monotonic clock."""

    pauses: Pauses
    was_up: bool = False  # in any life
    deaths_in_a_row: int = 0  # since the last life that lasted long enough
    _failures_in_a_row: int = 0  # consecutive lives that ended by themselves before they were up
    _began_at: float = 0.0
    _up_at: float | None = None

    def begin(self, now: float) -> None:
        self._began_at, self._up_at = now, None

    def come_up(self, now: float) -> None:
        """The child has reported that it works; further reports change nothing."""
        if self._up_at is None:
            self._up_at, self.was_up, self._failures_in_a_row = now, True, 0

    def end(self, now: float, code: int) -> float:
        """Returns how long to wait before the next life. `code` is negative for a signal."""
        if self._up_at is not None and now - self._up_at > times.STEADY_S:
            self.deaths_in_a_row = 0
        self.deaths_in_a_row += 1
        if self._up_at is not None or code == -signal.SIGKILL:
            return self.pauses.of_one_that_was_up(self.deaths_in_a_row, now - self._began_at)
        self._failures_in_a_row += 1
        return self.pauses.of_one_that_failed(self._failures_in_a_row)

    @property
    def is_up(self) -> bool:
        """Whether the current life, or else the last one, has reported that it works."""
        return self._up_at is not None

    @property
    def failing(self) -> bool:
        """Whether the last life ended by itself before it was up."""
        return self._failures_in_a_row > 0

    @property
    def in_crash_loop(self) -> bool:
        return self.deaths_in_a_row >= CRASH_LOOP
