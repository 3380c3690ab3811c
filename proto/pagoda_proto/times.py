"""All timeouts. Each one exceeds the duration of what it waits for; a test asserts these orders:

    heartbeat < suspect < worker dead < its lease < process with a stuck step ends
    engine core drains, plus a restart < a new request waits for it
    worker drains, plus a restart < a begun request waits for it
    store call times out < a batch is taken over
    store call times out < a ticket's run is taken over < it ends without its client < it is forgotten
    locked file < store call times out < longest pause until the next call
    lookup of a key seen recently < key is looked up again < store call times out < key expires without the store
    grammar's processor time < its wall time < its process is killed
    report shown again < wait for a report < engine core silent
    load report < engine core silent; its loop stuck < its supervisor replaces it < streams wait for it
    restart < a new request waits for it < a begun one waits for it < a request lost repeatedly is given up

Code that judges others by a clock first checks whether it was held up itself (`StallGuard`): to a process that was
stopped, everyone else seems to have missed their deadlines.
"""

from __future__ import annotations

from collections.abc import Callable

STALL_S = 1.0  # a tick this late means that the watcher itself did not run

# Engine core and worker
BEAT_S = 0.5  # interval of a worker's heartbeats
WORKER_SUSPECT_S = 1.5  # without a heartbeat for this long it gets no new work
WORKER_DEAD_S = 3.0  # .. and its requests move elsewhere
WORKER_LEASE_S = 4.0  # a worker that hears nothing for this long forgets its rows and registers anew
STEP_DEADLINE_S = 60.0  # a step counts as hung after this at the latest; sooner if the worker's speed is known:
STEP_DEADLINE_LEAST_S = 10.0  # .. after STEP_DEADLINE_FACTOR times the usual time of such a step, but at least this
STEP_DEADLINE_FACTOR = 20.0
LONGEST_STEP_S = 4.0  # prompts are cut into chunks so that no step takes much longer
STUCK_EXIT_S = 20.0  # a process whose lost step (or loop) still runs after this ends itself
HELLO_ANSWER_S = 3.0  # a registration without an answer for this long is retried, waiting longer each time ..
HELLO_ANSWER_MOST_S = 12.0  # .. up to this
HELLO_PAUSE_S = 1.0  # pause after a refused registration; longer each time ..
HELLO_PAUSE_MOST_S = 10.0  # .. up to this
IDLE_S = 10.0  # a worker without plans for this long may register anew without disturbing any request
BUDGET_RESTORE_S = 120.0  # after this long without running out of memory a worker offers steps twice as large

# Gateway and engine core
LOAD_KEEPALIVE_S = 1.0  # an engine core reports its load at least this often
ENGINE_SUSPECT_S = 2.5  # an engine core silent for this long is abandoned if there is another one
ENGINE_SILENT_S = 5.0  # .. and its session is lost
SESSION_PING_S = 10.0  # a silent session is pinged ..
SESSION_PONG_S = 5.0  # .. and ends without an answer within this
ENGINE_STUCK_S = 75.0  # an engine core that is heard but makes no progress is abandoned like a suspect
REPORT_WAIT_S = 2.0  # an observer does without an engine core's report after this
REPORT_AGE_S = 0.5  # .. and gets a cached one that is no older than this
LOOP_STUCK_S = 8.0  # an engine core whose loop has made no pass for this long ends itself

# Gateway and store
STORE_LOCKED_S = 2.0  # how long to retry a file that another process has locked
STORE_CALL_S = 5.0  # a call to the store that takes longer has failed
STORE_REST_S = 1.0  # .. and the store is not called for this long, doubling ..
STORE_REST_MOST_S = 15.0  # .. up to this
BATCH_LOOK_S = 1.0  # a gateway looks this often for batches that no gateway works on
BATCH_BEAT_S = 2.0  # the gateway working on one renews its claim this often
BATCH_LEASE_S = 12.0  # .. and after this long without renewal another gateway may take it over
BATCH_AGAIN_S = 0.5  # a line that found no room is retried after this, longer each time ..
BATCH_AGAIN_MOST_S = 30.0  # .. up to this
KEPT_S = 30 * 86_400  # for ended batches, files of batches without an expiry, and transcripts
RESPONSE_WRITE_S = 0.1  # output of a background response is written, then shown, this often at most
RESPONSE_POLL_S = 0.5  # readers at other gateways poll for it this often
RESPONSE_SWEEP_S = 3.0  # a gateway looks this often for responses that no gateway runs ..
RESPONSE_LEASE_S = 12.0  # .. because none has renewed its claim for this long
RESPONSE_LOOSE_S = 300.0  # a half-written response is removed after this; so is the note that one was deleted
TICKETS_FRESH_S = 10.0  # a tenant's share of tickets is counted in the store this often at most
TICKET_LEASE_S = 12.0  # another gateway runs a request with a ticket if no gateway has claimed it for this long
TICKET_GRACE_S = 30.0  # .. it continues for this long after its client has left
TICKET_RESTS_S = 60.0  # .. is kept for at least this long after its end, even if others need the room
BACKGROUND_TICKET_RESTS_S = 3600.0  # .. or, for a background one, after its start
TICKET_KEPT_S = 86_400.0  # .. and for this long if there is room
RECONNECT_FIRST_S = 0.1  # a client that lost its gateway tries the next one after this, doubling ..
RECONNECT_MOST_S = 5.0  # .. up to this

KEY_FRESH_S = 3.0  # an API key is looked up again after this, so revoking takes effect within this
KEY_LOOKUP_S = 1.0  # .. for which a request with a recently seen key waits no longer than this
KEY_STALE_S = 300.0  # .. and a key that was seen remains valid this long while the store is down
USAGE_FLUSH_S = 5.0  # usage of keys is written this often; a gateway that is killed loses at most this
USAGE_LAST_S = 2.0  # .. and when a gateway ends, taking at most this

GRAMMAR_COMPUTE_S = 0.1  # a grammar that takes more processor time is refused, since a worker's rows wait for it
GRAMMAR_CHECK_S = 2.0  # .. and so is one that takes more wall time, whatever else is running
GRAMMAR_REFUSED_S = 5.0  # .. it is not checked again for this long (the machine may have been slow), doubling ..
GRAMMAR_REFUSED_MOST_S = 600.0  # .. up to this
GRAMMAR_SILENT_S = 5.0  # the checking process is killed if it neither answers nor ends for this long

# Shutdown
GATEWAY_DRAINS_S = 30.0  # open requests of a gateway asked to leave may continue for this long
WORKER_DRAINS_S = 30.0  # .. at a worker, if no other one has room for them
ENGINE_CORE_DRAINS_S = 6.0  # .. and at an engine core, if its gateways know no other one
HAND_BACK_S = 2.0  # then the rest is handed back to the gateways, or to the store ..
SESSIONS_END_S = 2.0  # .. the sessions send their last answers and end
THREAD_ENDS_S = 3.0  # .. and the loop thread ends

# Supervisor and children
CHILD_BEAT_S = 1.0
WATCH_S = 1.0  # the supervisor looks this often for silent children
CHILD_SILENT_S = 10.0  # a child without a heartbeat for this long is replaced
FIRST_WORD_S = 60.0  # .. before its first heartbeat: importing takes long on a busy machine
WORKER_SILENT_S = 60.0  # the same for a worker: loading may keep its threads from running for long
RESTART_FIRST_S = 0.1  # pause before restarting a child that had worked, doubling ..
RESTART_MOST_S = 2.0  # .. up to this, less the duration of its last life
RESTART_NEVER_UP_FIRST_S = 0.5  # the same for a child that failed by itself before it ever worked
RESTART_NEVER_UP_MOST_S = 30.0
STEADY_S = 10.0  # a child that lived this long after coming up has recovered
START_S = 10.0  # a child starts within this on a busy machine, apart from loading weights
RESTART_DUE_S = RESTART_MOST_S + START_S  # a process that ended is back by then
TEMPLATE_SILENT_S = 5.0  # a template that has not reported its child's end for this long is replaced
LAST_WORDS_S = 1.0  # the supervisor reads the remaining output of an ended child for this long
GATEWAY_LEAVES_S = 8.0  # a gateway is killed this long after its lame-duck and drain times
ENGINE_CORE_STOPS_S = 12.0  # an engine core is killed this long after its drain time
WORKER_STOPS_S = 8.0  # .. and a worker
OFFLINE_STOPS_S = 30.0  # a closing AsyncLLM waits this long for the step that its thread computes

# What streams wait for
RESUME_WAIT_S = 30.0  # a begun stream waits this long for its engine core, or another one
NO_WORKER_WAIT_S = 120.0  # .. and there for a worker that can continue it
SUBMIT_WAIT_S = 20.0  # a new request is refused once all engine cores have been gone for this long
CONNECT_WAIT_S = 2.0  # .. but waits at least this long, even if there never was one
LOSING_S = 180.0  # a request lost repeatedly is given up after this long without a token


class StallGuard:
    """Tells a watcher how long it was held up. `due_s` is how often it ticks; `now` is any monotonic clock."""

    def __init__(self, due_s: float, now: float) -> None:
        self._due_s = due_s
        self._ticked_at = now

    def tick(self, now: float) -> float:
        """Seconds for which no other process may be blamed: 0, or all the time since the last tick."""
        gap_s = now - self._ticked_at
        self._ticked_at = now
        return gap_s if gap_s > self._due_s + STALL_S else 0.0


class LivedClock:
    """Time without the periods in which this process did not run, for which it must blame no other.

    `clock` is any monotonic clock. The process must call `now` at least every `due_s`; users that share deadlines share
    one instance.
    """

    def __init__(self, due_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guard = StallGuard(due_s, clock())
        self._slept_s = 0.0

    def now(self) -> float:
        """Seconds, without periods in which nothing called this."""
        now = self._clock()
        self._slept_s += self._guard.tick(now)
        return now - self._slept_s


def hello_answer_s(failed: int) -> float:
    """How long a registration waits for its answer after `failed` attempts in a row without one."""
    return min(HELLO_ANSWER_S * 2.0 ** min(failed, 16), HELLO_ANSWER_MOST_S)


def hello_pause_s(refused: int) -> float:
    """How long a worker waits after having been refused `refused` times in a row."""
    return min(HELLO_PAUSE_S * 2.0 ** min(refused - 1, 16), HELLO_PAUSE_MOST_S)


def link_times_ms(dead_s: float = WORKER_DEAD_S) -> tuple[int, int]:
    """How often each end of a worker's connection pings the other, and after how long without an answer it counts as
    gone."""
    return round(dead_s * 1000 / 3), round(dead_s * 1000)
