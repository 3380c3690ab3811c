"""A lost engine core is expected back: how long requests wait for it, and when clients should retry, depends on when an
engine core was last usable.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_proto import times

RETRY_FIRST_S = 1.0
RETRY_MOST_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds, each with its default in `pagoda_proto.times`. `tick_s` is how often deadlines are checked."""

    resume_s: float = times.RESUME_WAIT_S
    no_worker_s: float = times.NO_WORKER_WAIT_S
    losing_s: float = times.LOSING_S
    submit_s: float = times.SUBMIT_WAIT_S
    connect_s: float = times.CONNECT_WAIT_S
    silent_s: float = times.ENGINE_SILENT_S
    suspect_s: float = times.ENGINE_SUSPECT_S
    stuck_s: float = times.ENGINE_STUCK_S
    restart_s: float = times.RESTART_DUE_S
    tick_s: float = 0.1


class Absence:
    """Since when no engine core has taken requests. All times are `LivedClock`'s."""

    def __init__(self, waits: Waits, now: float) -> None:
        self._waits = waits
        self._since: float | None = now
        self._was_there = False

    def begin(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def end(self) -> None:
        self._since = None
        self._was_there = True

    def submit_wait_s(self, now: float) -> float:
        """How long a request that arrives now waits before it is refused."""
        left_s = self._since + self._waits.submit_s - now if self._was_there and self._since is not None else 0.0
        return max(left_s, self._waits.connect_s)

    def retry_after_s(self, now: float) -> float:
        """When a request refused now should be retried: when a restart is due. After that nobody knows: assume that the
        engine core stays away for as long again, as retries that rare cost little.
        """
        if self._since is None:
            return RETRY_FIRST_S
        gone_s = now - self._since
        expected_s = self._waits.restart_s - gone_s if gone_s < self._waits.restart_s else gone_s
        return min(max(expected_s, RETRY_FIRST_S), RETRY_MOST_S)
