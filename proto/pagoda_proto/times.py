"""How long everybody waits for everybody else. Each wait outlasts what it waits for; the rungs are asserted in a test.

    a beat < suspicion < a worker's death < its lease < its step is stuck for good
    a load report < a silent engine core; its loop is stuck < its supervisor replaces it < streams wait for it

Whoever judges others by a clock first asks whether it was held up itself (`StallGuard`): a process that was stopped
wakes up to deadlines that everybody seems to have missed.
"""

from __future__ import annotations

STALL_S = 1.0  # a tick later than this means that the watcher itself did not run

# Engine core and worker
BEAT_S = 0.5  # a worker beats this often
WORKER_SUSPECT_S = 1.5  # without a beat for this long it gets no new work
WORKER_DEAD_S = 3.0  # .. and its rows go elsewhere
WORKER_LEASE_S = 4.0  # a worker that hears nothing for this long forgets its rows and registers anew
STEP_DEADLINE_S = 60.0  # a step is hung after this, whatever it computes; sooner where the worker's speed is known
STEP_DEADLINE_LEAST_S = 10.0  # .. namely after so many times what the worker takes for such a step, but never before
STEP_DEADLINE_FACTOR = 20.0
STUCK_EXIT_S = 20.0  # a process whose lost step (or loop) runs on for this long ends itself

# Gateway and engine core
LOAD_KEEPALIVE_S = 1.0  # an engine core tells its load at least this often
ENGINE_SILENT_S = 5.0  # a session in which nothing was heard for this long is lost
LOOP_STUCK_S = 8.0  # an engine core whose loop has not come round for this long ends itself

# An engine core's way down
HAND_BACK_S = 2.0  # requests go back to their gateways
SESSIONS_END_S = 2.0  # .. and take their answers along
THREAD_ENDS_S = 3.0  # .. and the loop ends

# Supervisor and children
CHILD_BEAT_S = 1.0
CHILD_SILENT_S = 10.0  # a child that did not beat for this long is replaced
WORKER_SILENT_S = 60.0  # loading may keep a worker's threads from running for long
RESTART_MOST_S = 2.0  # longest pause before a child that had worked is started again
START_S = 10.0  # a child needs no longer to start on a busy machine, loading of weights aside

# What streams wait for
RESUME_WAIT_S = 30.0  # a begun stream waits this long for its engine core, or another one
NO_WORKER_WAIT_S = 120.0  # .. and in there for a worker that can go on with it


class StallGuard:
    """Tells a watcher by how long it was held up. `due_s` is how often it ticks; `now` any monotonic clock."""

    def __init__(self, due_s: float, now: float) -> None:
        self._due_s = due_s
        self._ticked_at = now

    def tick(self, now: float) -> float:
        """Seconds for which nobody else may be blamed: 0, or all the time since the last tick."""
        gap_s = now - self._ticked_at
        self._ticked_at = now
        return gap_s if gap_s > self._due_s + STALL_S else 0.0
