"""All waiting requests wait here, in one order; a worker gets a request only when it can start it in its next step.

So a worker that joins has work from its next step on, and no request waits behind others on a slow worker. A request
that cannot start anywhere yet is not overtaken on the workers that could take it.

A request that has begun continues only with the weights and numerics of its first token, and before all new requests.
One that was running at two losses of its worker, without a token in between, is a suspect. Each worker has at most one
suspect that has not yet proved itself by a token, so if that worker is lost, the culprit is known. A process that was
silent and registers again did not die, so requests blamed for that are relieved.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.fairness import Fairness
from pagoda_engine_core.dispatch.pace import Pace
from pagoda_engine_core.dispatch.policy import POLICIES
from pagoda_engine_core.dispatch.suspicion import blame, is_suspect, relieve
from pagoda_engine_core.dispatch.waiting import Ahead, QueuedRequest, Rank, WaitingQueue
from pagoda_engine_core.dispatch.worker import Worker
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.scheduling.room import Room
from pagoda_engine_core.scheduling.scheduler import Scheduler
from pagoda_engine_core.workers.executor import LeaveCause, WorkerLeft
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta
from pagoda_proto.steps import Hello
from pagoda_proto.times import NO_WORKER_WAIT_S, WORKER_DRAINS_S

log = logging.getLogger(__name__)

MAX_LOST_LIVES = 20
"""A request that had a row in this many lost lives, whatever ended them, without producing a token, is ended."""

LEAST_ROWS_TO_SPARE = 16
"""A worker with fewer rows keeps none free for other tenants."""


class Router:
    """All open requests: those that workers hold and those that wait for one. Times are the engine's `now`.
    `plans_late`: plan the steps of workers no sooner than necessary."""

    def __init__(self, config: EngineConfig, *, plans_late: bool = False) -> None:
        self._config = config
        self._plans_late = plans_late
        self._policy = POLICIES[config.policy]
        self._row_ids: Iterator[int] = itertools.count(1)
        self._fairness = Fairness(counting=config.policy == "fair")
        self._queue = WaitingQueue(self._policy, self._fairness)
        self._totals: Counter[str] = Counter()  # of workers that are gone
        self._fleet = Pace()
        self.workers: dict[int, Worker] = {}
        self._start_s = 0.0  # longest startup of a worker so far
        self._first_expiry = math.inf  # nothing new in the queue expires before
        self.refused_numerics = ""  # of the last worker refused for not having the needed ones

    # --- workers -----------------------------------------------------------------------------------------------------

    def join(self, epoch: int, hello: Hello) -> Worker:
        if self._config.preemption == "swap" and not hello.num_swap_blocks:
            log.warning("preemption=swap, but worker %s has no swap space: it recomputes", hello.worker_id)
        self._start_s = max(self._start_s, hello.start_s)
        scheduler = Scheduler(self._config, hello, self._policy, self._row_ids)
        depth = self._config.max_steps_in_flight
        worker = self.workers[epoch] = Worker(epoch, hello, scheduler, depth, self._plans_late)
        held = (request for one in self.workers.values() for request in one.requests.values())
        for request in itertools.chain(held, (queued.request for queued in self._queue.entries())):
            relieve(request, hello.incarnation)
        return worker

    def leave(self, left: WorkerLeft, now: float) -> list[Delta]:
        """Take back the worker's requests. Those convicted of killing workers end here."""
        worker = self.workers.pop(left.epoch, None)
        if worker is None:
            return []
        self._totals.update(asdict(worker.scheduler.totals))
        had_rows = {request.request_id for request in worker.requests.values() if request.num_rows}
        blamed = _blamed(worker, left, had_rows)
        silent = worker.hello.incarnation if left.cause is LeaveCause.SILENT else ""

        def taken_back(request: Request) -> list[Delta]:
            name = request.request_id
            self._totals["replays"] += request.started
            request.lost_lives += name in had_rows
            if name in blamed:
                blame(request, silent, alone=name == worker.suspect)
            return self._give_up_or_queue(request, name == worker.suspect, now)

        deltas = []
        for request in worker.scheduler.take_back(now):
            deltas += self._guarded(request, partial(taken_back, request), now)
        return deltas

    def lose_track(self, worker: Worker, now: float) -> list[Delta]:
        """End those requests of a departed worker that could not be taken back."""
        lost = [request for name, request in worker.requests.items() if not self.is_waiting(name)]
        return [delta for request in lost for delta in request.lose_track(now)]

    def _give_up_or_queue(self, request: Request, unproven: bool, now: float) -> list[Delta]:
        if unproven and request.deaths >= self._config.max_attempts:
            message = f"{request.deaths} workers were lost while they computed this request, before it had a token"
            return request.fail(ErrorCode.REQUEST_FAILED_REPEATEDLY, message, now)
        if request.lost_lives >= MAX_LOST_LIVES:
            message = f"{request.lost_lives} workers began this request, and none produced a token"
            return request.fail(ErrorCode.INTERNAL, message, now)
        self.add(request, now)
        return []

    def stepped(self, worker: Worker, worked_s: float, now: float) -> int:
        """Note that the worker's oldest step is done. Returns how many tokens of requests it has served."""
        return worker.stepped(worked_s, now, self._fleet)

    @property
    def needed_numerics(self) -> str:
        """Without a worker: the numerics that the next one must have because a request that has begun needs them."""
        begun_by = (queued.request.begun for queued in self._queue.entries())
        return next((begun.numerics_id for begun in begun_by if begun is not None), "")

    def drain(self, worker_id: str, now: float) -> None:
        """Have a worker leave, within the time allowed to one that leaves by itself. Raises PagodaError NOT_FOUND."""
        workers = [worker for worker in self.workers.values() if worker.hello.worker_id == worker_id]
        if not workers:
            raise PagodaError(ErrorCode.NOT_FOUND, f"there is no worker {worker_id!r} here", "worker_id")
        for worker in workers:
            worker.leave_by = min(worker.leave_by or math.inf, now + WORKER_DRAINS_S)

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a new request, or one that was taken back."""
        if self.workers and request.ledger.cause is Cause.QUEUED_NO_WORKER:
            request.ledger.enter(Cause.QUEUED_BEHIND, now)
        self._queue.add(request, Rank.of(request), now)
        self._first_expiry = min(self._first_expiry, now + self._patience_s(request))

    def ahead_of(self, request: Request) -> Ahead:
        """What a request not queued yet would wait behind."""
        ahead = self._queue.ahead_of(request, Rank.of(request))
        schedulers = [worker.scheduler for worker in self.workers.values()]
        num_requests = ahead.num_requests + sum(scheduler.num_waiting for scheduler in schedulers)
        return Ahead(num_requests, ahead.num_tokens + sum(scheduler.queued_tokens for scheduler in schedulers))

    def is_waiting(self, request_id: str) -> bool:
        return self._queue.get(request_id) is not None

    def holder(self, request_id: str) -> Worker | None:
        return next((worker for worker in self.workers.values() if request_id in worker.requests), None)

    def abort(self, request_id: str, choices: tuple[int, ...], now: float) -> list[Delta]:
        """End some choices, or all. Unknown ids are ignored."""
        worker = self.holder(request_id)
        if worker is not None:
            return self.note_endings(worker, worker.scheduler.abort(request_id, choices, now))
        request = self._queue.get(request_id)
        if request is None:
            return []
        deltas = request.abort(choices, now)
        if request.ended:
            self._queue.remove(request_id)
            request.let_go()
        return deltas

    def note_endings(self, worker: Worker, deltas: list[Delta]) -> list[Delta]:
        """Note which of a worker's requests the deltas end, and whether its suspect is cleared; returns the deltas."""
        for delta in deltas:
            if delta.ends_request and (request := worker.requests.pop(delta.request_id, None)):
                self._fairness.charge([request])
                request.let_go()
                worker.num_ended += 1
        suspect = worker.requests.get(worker.suspect)
        if suspect is None or not is_suspect(suspect):
            worker.suspect = ""
        return deltas

    def take_all(self, now: float) -> list[Request]:
        """Remove and return every open request, and forget the workers."""
        requests = self._queue.take_all()
        for worker in self.workers.values():
            self._totals.update(asdict(worker.scheduler.totals))
            requests += worker.scheduler.take_back(now)
        self.workers.clear()
        return requests

    def forgive(self, seconds: float, now: float) -> None:
        """Exclude a time in which we did not run from timeouts and from the pace of workers."""
        self._queue.forgive(seconds, now)
        for worker in self.workers.values():
            worker.pace.forgive()

    def expire(self, now: float) -> list[Delta]:
        """End requests that could not start in time, and begun ones that found no worker to continue them in time."""
        if now < self._first_expiry:
            return [delta for queued in self._queue.begun_entries() for delta in self._expire(queued, now)]
        deltas = [delta for queued in self._queue.entries() for delta in self._expire(queued, now)]
        times = (one.since + self._patience_s(one.request) for one in self._queue.entries())
        self._first_expiry = min(times, default=math.inf)
        return deltas

    def _patience_s(self, request: Request) -> float:
        begun_s, asked_s = NO_WORKER_WAIT_S + 2 * self._start_s, request.record.queue_timeout_s
        return begun_s if request.resumes else self._config.patience_s(asked_s)

    def _expire(self, queued: QueuedRequest, now: float) -> list[Delta]:
        request, patience_s = queued.request, self._patience_s(queued.request)
        if request.resumes and any(worker.scheduler.serves(request) for worker in self.workers.values()):
            queued.since = now
        if now - queued.since < patience_s:
            return []
        self._queue.remove(request.request_id)
        code, why = self._why_not(request)
        deltas = request.fail(code, f"{why} within {patience_s:g} s", now)
        request.let_go()
        return deltas

    def _why_not(self, request: Request) -> tuple[ErrorCode, str]:
        if not request.resumes:
            if self.workers:
                return ErrorCode.OVERLOADED, "could not begin, for every worker was busy,"
            return ErrorCode.UNAVAILABLE, "could not begin, for no worker came"
        if request.begun is None:
            return ErrorCode.UNAVAILABLE, "could not go on, for no worker came"
        others = {worker.hello.numerics_id for worker in self.workers.values()} | {self.refused_numerics}
        there = ", ".join(repr(name) for name in sorted(others - {"", request.begun.numerics_id}))
        why = f"could not continue: no worker came with numerics {request.begun.numerics_id!r}"
        return ErrorCode.STREAM_INTERRUPTED, why + (f" (there was {there})" if there else "")

    # --- the choice of a worker ---------------------------------------------------------------------------------------

    @property
    def anybody_waits(self) -> bool:
        """Whether any request waits to be placed: in the queue, or on a worker that is to leave."""
        return len(self._queue) > 0 or any(worker.leaving and worker.requests for worker in self.workers.values())

    @property
    def crowded(self) -> bool:
        """Whether requests wait because no worker has room, not only until the next step is planned."""
        ready = self._ready()
        return bool(ready) and all(worker.short for worker in ready)

    def must_wait(self, ahead: Ahead) -> bool:
        """Whether a new request behind these can start only when others have ended."""
        ready = self._ready()
        rows = sum(self._max_rows(worker) - worker.scheduler.num_rows for worker in ready)
        places = min(rows, sum(worker.num_ended for worker in ready)) if self.crowded else rows
        return ahead.num_requests >= places

    def _ready(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.ready]

    def _max_rows(self, worker: Worker) -> int:
        return min(worker.hello.max_rows, self._config.max_rows)

    def dispatch(self, rooms: dict[int, Room], now: float) -> list[Delta]:
        """Give waiting requests, in order, to workers that can start them in the step planned next. `rooms`, by epoch,
        is what these have left, and is reduced by what is placed. Requests of workers that are to leave are moved
        first; those that cannot be stay where they are."""
        deltas: list[Delta] = []
        for epoch, room in rooms.items():
            self.workers[epoch].short, self.workers[epoch].num_ended = room.full, 0
        rooms = {epoch: room for epoch, room in rooms.items() if not room.full}
        if self.anybody_waits:
            self._fairness.charge(itertools.chain.from_iterable(w.requests.values() for w in self.workers.values()))
        for leaving in [worker for worker in self.workers.values() if worker.leaving]:
            for request in list(leaving.requests.values()):
                deltas += self._guarded(request, partial(self._move, request, leaving, rooms, now), now)
        order = iter(self._queue)
        while rooms and (queued := next(order, None)) is not None:
            deltas += self._guarded(queued.request, partial(self._try, queued.request, rooms, now), now)
        if not len(self._queue):
            for worker in self.workers.values():
                worker.short = False
        return deltas

    def _guarded(self, request: Request, place: Callable[[], list[Delta]], now: float) -> list[Delta]:
        try:
            return place()
        except Exception:  # concerns this request only
            log.exception("request %r cannot be placed", request.request_id)
            return self._drop(request, now)

    def _try(self, request: Request, rooms: dict[int, Room], now: float) -> list[Delta]:
        takers = [worker for worker in self.workers.values() if worker.takes(request)]
        causes = {worker.epoch: self._lacks(worker, request, rooms.get(worker.epoch)) for worker in takers}
        for worker in takers:
            if causes[worker.epoch] is None and self._is_spared(worker, request, rooms[worker.epoch], now):
                causes[worker.epoch] = Cause.QUEUED_ROWS
        able = [worker for worker in takers if causes[worker.epoch] is None]
        if not able:
            for epoch, cause in causes.items():  # requests behind it must not overtake it there
                if rooms.pop(epoch, None) is not None:
                    self.workers[epoch].short = True
                request.note_blocked(cause or Cause.QUEUED_BEHIND, now)
            return []
        self._queue.remove(request.request_id)
        return self._place(request, able, rooms, now)

    def _move(self, request: Request, leaving: Worker, rooms: dict[int, Room], now: float) -> list[Delta]:
        takers = [worker for worker in self.workers.values() if worker.takes(request)]
        able = [worker for worker in takers if self._lacks(worker, request, rooms.get(worker.epoch)) is None]
        if not able:
            return []
        leaving.scheduler.release(request.request_id, now)
        leaving.forget(request.request_id)
        self._totals["replays"] += request.started
        return self._place(request, able, rooms, now)

    def _is_spared(self, worker: Worker, request: Request, room: Room, now: float) -> bool:
        """Whether to keep the worker's last row free for another tenant, so that its next request need not wait for one
        to end. It is kept if several tenants were active lately and this request's tenant has a request here."""
        tenant = self._fairness.tenant(request)
        few = self._max_rows(worker) < LEAST_ROWS_TO_SPARE
        if room.rows > 1 or few or request.resumes or self._fairness.is_alone(tenant, now):
            return False
        return any(self._fairness.tenant(held) == tenant for held in worker.requests.values())

    def _lacks(self, worker: Worker, request: Request, room: Room | None) -> Cause | None:
        if room is None or room.full:
            return Cause.QUEUED_BEHIND
        return room.lacks(worker.scheduler.need(request, room))

    def _place(self, request: Request, able: list[Worker], rooms: dict[int, Room], now: float) -> list[Delta]:
        worker = min(able, key=lambda worker: worker.cost(request))
        rooms[worker.epoch].take(worker.scheduler.need(request, rooms[worker.epoch]))
        worker.requests[request.request_id] = request
        self._fairness.charge([request])
        if is_suspect(request):
            worker.suspect = request.request_id
        return self.note_endings(worker, worker.scheduler.add(request, now))

    def _drop(self, request: Request, now: float) -> list[Delta]:
        """End a request that raised, wherever it is now."""
        if self.is_waiting(request.request_id):
            self._queue.remove(request.request_id)
        for worker in self.workers.values():
            worker.forget(request.request_id)
        deltas = request.fail(ErrorCode.INTERNAL, "the engine core cannot place this request", now)
        request.let_go()
        return deltas

    # --- numbers -----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + sum(worker.scheduler.num_waiting for worker in self.workers.values())

    @property
    def num_running(self) -> int:
        return sum(worker.scheduler.num_running for worker in self.workers.values())

    @property
    def queued_tokens(self) -> int:
        return self._queue.num_tokens + sum(worker.scheduler.queued_tokens for worker in self.workers.values())

    @property
    def kv_usage(self) -> float:
        """Fraction of all blocks in use; a worker with several groups counts by its fullest."""
        total = sum(worker.hello.num_blocks for worker in self.workers.values())
        used = sum(worker.hello.num_blocks * worker.scheduler.kv_usage for worker in self.workers.values())
        return used / total if total else 0.0

    def totals(self) -> Counter[str]:
        """Totals of all workers since the start, including those that are gone."""
        totals = Counter(self._totals)
        for worker in self.workers.values():
            totals.update(asdict(worker.scheduler.totals))
        return totals

    def check_fits(self, request: Request) -> None:
        """Raises PagodaError if there are workers and none is large enough."""
        if not self.workers or any(worker.scheduler.fits(request) for worker in self.workers.values()):
            return
        num_tokens = request.num_prompt_tokens + request.max_output_tokens
        message = f"prompt and output of up to {num_tokens} tokens do not fit into any worker's KV cache"
        raise PagodaError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, "max_tokens")

    def plannable(self, now: float) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.next_at <= now]

    def next_after(self, now: float) -> float:
        """When the next step after `now` is to be planned if nothing happens; ignores steps due by `now`."""
        return min((at for worker in self.workers.values() if (at := worker.next_at) > now), default=math.inf)


def _blamed(worker: Worker, left: WorkerLeft, had_rows: set[str]) -> set[str]:
    """Requests that may have ended a life: those in the failed step, else those with rows, or all if its scheduler
    raised."""
    if not left.cause.blames:
        return set()
    if left.cause is LeaveCause.UNPLANNED:
        return set(worker.requests)
    return worker.scheduler.requests_in(left.step) or had_rows
