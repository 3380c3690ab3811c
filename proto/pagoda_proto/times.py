"""How long everybody waits for everybody else. Each wait outlasts what it waits for; the rungs are asserted in a test.

    a beat < suspicion < a worker's death < its lease < its step is stuck for good
    an engine core that leaves, and a restart < a new request waits for it
    a worker that leaves, and a restart < a begun request waits for it
    a call to the store is given up < a batch is taken over
    a call to the store is given up < a ticket's run is taken over < it ends without its client < it is forgotten
    a locked file < a call to the store is given up < its next trial at the latest
    a key that was seen lately is not waited for < it is asked for again < a call to the store < it is no longer good
    a grammar is computed < it is checked < its process is given up
    a report that is shown again < one that is waited for < a silent engine core
    a load report < a silent engine core; its loop is stuck < its supervisor replaces it < streams wait for it
    a restart < a new request waits for it < a begun one waits for it < one that is lost again and again is given up

Whoever judges others by a clock first asks whether it was held up itself (`StallGuard`): a process that was stopped
wakes up to deadlines that everybody seems to have missed.
"""

from __future__ import annotations

from collections.abc import Callable

STALL_S = 1.0  # a tick later than this means that the watcher itself did not run

# Engine core and worker
BEAT_S = 0.5  # a worker beats this often
WORKER_SUSPECT_S = 1.5  # without a beat for this long it gets no new work
WORKER_DEAD_S = 3.0  # .. and its rows go elsewhere
WORKER_LEASE_S = 4.0  # a worker that hears nothing for this long forgets its rows and registers anew
STEP_DEADLINE_S = 60.0  # a step is hung after this, whatever it computes; sooner where the worker's speed is known
STEP_DEADLINE_LEAST_S = 10.0  # .. namely after so many times what the worker takes for such a step, but never before
STEP_DEADLINE_FACTOR = 20.0
LONGEST_STEP_S = 4.0  # prompts are cut so that no step takes longer, about
STUCK_EXIT_S = 20.0  # a process whose lost step (or loop) runs on for this long ends itself
HELLO_ANSWER_S = 3.0  # a registration that is not answered for this long is given up and begun anew, then for longer
HELLO_ANSWER_MOST_S = 12.0
HELLO_PAUSE_S = 1.0  # between a registration that was refused and the next; longer every time
HELLO_PAUSE_MOST_S = 10.0
IDLE_S = 10.0  # a worker without plans for this long may register anew at nobody's cost
BUDGET_RESTORE_S = 120.0  # after so long without a lack of memory a worker offers steps twice as large

# Gateway and engine core
LOAD_KEEPALIVE_S = 1.0  # an engine core tells its load at least this often
ENGINE_SUSPECT_S = 2.5  # an engine core of which nothing was heard for this long is left, where another one works
ENGINE_SILENT_S = 5.0  # .. and its session is lost
SESSION_PING_S = 10.0  # a session that says nothing is asked for a sign of life ..
SESSION_PONG_S = 5.0  # .. without which it is over
ENGINE_STUCK_S = 75.0  # one that is heard, and gets on with nothing, is left as a suspect is
REPORT_WAIT_S = 2.0  # who only looks on goes without an engine core's report after this
REPORT_AGE_S = 0.5  # .. and is shown again one that is no older
LOOP_STUCK_S = 8.0  # an engine core whose loop has not come round for this long ends itself

# Gateway and store
STORE_LOCKED_S = 2.0  # a file that another process writes to is tried for so long
STORE_CALL_S = 5.0  # a call to the store that takes longer has failed
STORE_REST_S = 1.0  # .. and for so long nobody calls it, doubling ..
STORE_REST_MOST_S = 15.0  # .. up to this
BATCH_LOOK_S = 1.0  # a gateway looks this often for batches that nobody works on
BATCH_BEAT_S = 2.0  # who works on one says so this often
BATCH_LEASE_S = 12.0  # .. and after this long without a word another gateway may
BATCH_AGAIN_S = 0.5  # a line that found no room is tried again, after longer every time ..
BATCH_AGAIN_MOST_S = 30.0  # .. up to this
KEPT_S = 30 * 86_400  # a batch that has ended, files of batches where nobody says how long, and transcripts
RESPONSE_WRITE_S = 0.1  # what a response in the background tells is written, then shown, this often at most
RESPONSE_POLL_S = 0.5  # those who follow it at another gateway look for it this often
RESPONSE_SWEEP_S = 3.0  # a gateway looks this often for responses that nobody runs ..
RESPONSE_LEASE_S = 12.0  # .. as nobody said so for this long
RESPONSE_LOOSE_S = 300.0  # what is half written of one is cleared away after this; a deleted one comes back no sooner
TICKETS_FRESH_S = 10.0  # what a tenant has of tickets is counted in the store this often at most
TICKET_LEASE_S = 12.0  # a request with a ticket is run by another gateway when nobody said for so long that it does
TICKET_GRACE_S = 30.0  # .. and goes on for so long when its client has left
TICKET_RESTS_S = 60.0  # .. is known for so long after its end, also where room is made for others
BACKGROUND_TICKET_RESTS_S = 3600.0  # .. or, of one in the background, after its beginning
TICKET_KEPT_S = 86_400.0  # .. and for so long to whoever asks again, where there is room
RECONNECT_FIRST_S = 0.1  # a client that lost its gateway tries the next one after this, doubling ..
RECONNECT_MOST_S = 5.0  # .. up to this

KEY_FRESH_S = 3.0  # an API key is looked up again after this, so it is revoked everywhere after this
KEY_LOOKUP_S = 1.0  # .. for which a request that shows one seen lately waits no longer
KEY_STALE_S = 300.0  # .. and so long a key that was seen goes on to be good while the store is gone
USAGE_FLUSH_S = 5.0  # what keys used is written this often, and as much of it is lost with a gateway that is killed
USAGE_LAST_S = 2.0  # .. and at its end, if that takes no longer

GRAMMAR_COMPUTE_S = 0.1  # a grammar that takes more processor time is refused: a worker's rows wait for it
GRAMMAR_CHECK_S = 2.0  # .. and one that takes longer, whoever else computes
GRAMMAR_REFUSED_S = 5.0  # .. and is not tried again for so long, doubling, for the machine may have been slow ..
GRAMMAR_REFUSED_MOST_S = 600.0  # .. up to this
GRAMMAR_SILENT_S = 5.0  # the process that checks them is killed when it neither answers nor ends for so long

# On the way down
GATEWAY_DRAINS_S = 30.0  # what is open at a gateway that was asked to leave may go on for so long
WORKER_DRAINS_S = 30.0  # .. at a worker, as far as no other one has room for it
ENGINE_CORE_DRAINS_S = 6.0  # .. and at an engine core, as far as its gateways know no other one
HAND_BACK_S = 2.0  # what is left goes back to the gateways, or into the store
SESSIONS_END_S = 2.0  # .. and take their answers along
THREAD_ENDS_S = 3.0  # .. and the loop ends

# Supervisor and children
CHILD_BEAT_S = 1.0
WATCH_S = 1.0  # the supervisor looks this often who was silent
CHILD_SILENT_S = 10.0  # a child that did not beat for this long is replaced
FIRST_WORD_S = 60.0  # .. one that never did, for this long: it reads its modules in what time the machine leaves it
WORKER_SILENT_S = 60.0  # loading may keep a worker's threads from running for long
RESTART_FIRST_S = 0.1  # pause before a child that had worked is started again, doubling ..
RESTART_MOST_S = 2.0  # .. up to this, less what its last life had lasted
RESTART_NEVER_UP_FIRST_S = 0.5  # the same for a child that failed by itself before it worked
RESTART_NEVER_UP_MOST_S = 30.0
STEADY_S = 10.0  # a child that lived this long after coming up has recovered
START_S = 10.0  # a child needs no longer to start on a busy machine, loading of weights aside
RESTART_DUE_S = RESTART_MOST_S + START_S  # what has ended is there again by then
TEMPLATE_SILENT_S = 5.0  # a template that does not tell of its child's end for this long is replaced
LAST_WORDS_S = 1.0  # the supervisor reads this long what an ended child had said
GATEWAY_LEAVES_S = 8.0  # a gateway is killed so long after its lame duck and drain times are over
ENGINE_CORE_STOPS_S = 12.0  # an engine core is killed so long after its drain time
WORKER_STOPS_S = 8.0  # .. and a worker
OFFLINE_STOPS_S = 30.0  # a closing AsyncLLM waits this long for the step that its thread computes

# What streams wait for
RESUME_WAIT_S = 30.0  # a begun stream waits this long for its engine core, or another one
NO_WORKER_WAIT_S = 120.0  # .. and in there for a worker that can go on with it
SUBMIT_WAIT_S = 20.0  # a new request waits until an engine core has been gone for this long
CONNECT_WAIT_S = 2.0  # .. and this long at least, also for one that was never there
LOSING_S = 180.0  # who is lost again and again is given up when no token came for this long


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


class LivedClock:
    """Time less the stretches in which this process did not run: what it slept through it blames on nobody.

    `clock` is any monotonic clock. Somebody in the process asks at least every `due_s`; all who share deadlines share
    one of these.
    """

    def __init__(self, due_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guard = StallGuard(due_s, clock())
        self._slept_s = 0.0

    def now(self) -> float:
        """Seconds that only count while somebody asks."""
        now = self._clock()
        self._slept_s += self._guard.tick(now)
        return now - self._slept_s


def hello_answer_s(failed: int) -> float:
    """How long a registration waits for its answer after so many attempts in a row have failed."""
    return min(HELLO_ANSWER_S * 2.0 ** min(failed, 16), HELLO_ANSWER_MOST_S)


def hello_pause_s(refused: int) -> float:
    """How long a worker waits after having been refused so many times in a row."""
    return min(HELLO_PAUSE_S * 2.0 ** min(refused - 1, 16), HELLO_PAUSE_MOST_S)


def link_times_ms(dead_s: float = WORKER_DEAD_S) -> tuple[int, int]:
    """How often either end of a worker's connection asks whether the other one is there, and after how long without a
    word it is not."""
    return round(dead_s * 1000 / 3), round(dead_s * 1000)
