"""One thread mutates all state, one pass at a time: drain inbox, place, schedule, send, wait, apply, publish.

Other threads only append to the inbox and read snapshots. An error in one request ends that request. An error in one
worker's scheduler discards that worker's state, and its requests are replayed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec

from pagoda_engine_core import views
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.admission import Admission, HeldSubmission
from pagoda_engine_core.dispatch.answers import Answers, Draining, NoObserver, Observer, Sink, Submission
from pagoda_engine_core.dispatch.inbox import Inbox, stopped
from pagoda_engine_core.dispatch.router import Router
from pagoda_engine_core.dispatch.worker import Worker
from pagoda_engine_core.grammars.checker import Checker, GrammarChecker
from pagoda_engine_core.grammars.verdicts import Verdict
from pagoda_engine_core.scheduling.decoding import News
from pagoda_engine_core.scheduling.room import Room
from pagoda_engine_core.views import Stats, WorkerView
from pagoda_engine_core.workers.executor import (
    Executor,
    ExecutorEvent,
    LeaveCause,
    StepDone,
    WorkerChanged,
    WorkerJoined,
    WorkerLeft,
)
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FROM_THE_START, Delta, Load, RequestRecord, Resume
from pagoda_proto.steps import Drain, ResetWorker
from pagoda_proto.times import LOOP_STUCK_S, StallGuard

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_WAIT_S = 0.25
EXPIRY_INTERVAL_S = 0.1
AUDIT_INTERVAL_S = 5.0


class EngineCore:
    """Gives every accepted request exactly one ending, whatever happens to workers and other requests.

    Owns `executor` and `checker`, which `close` closes; `clock` returns monotonic seconds. Either one thread is in
    `run`, or the caller's own thread calls `step`; any thread may call `submit`, `abort`, `abandon`, `hand_back`,
    `call`, `load` and `alive`. `admission` knows which requests the model accepts.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        *,
        engine_id: str = "",
        observer: Observer | None = None,
        checker: Checker | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._clock = clock
        self._observer = observer or NoObserver()
        self._router = Router(config, plans_late=executor.concurrent)
        self._checker = checker or GrammarChecker()
        self.admission = Admission(config, partial(self._checker.check, told=self._grammar_checked))
        self._answers = Answers(self._observer)
        self._inbox = Inbox(executor.wake)
        self._totals: Counter[str] = Counter()
        self._progress_at = self.passed_at = self._expired_at = self._audited_at = clock()
        self._guard = StallGuard(IDLE_WAIT_S, clock())
        self._load = Load(engine_id=engine_id or secrets.token_hex(8))
        self._listeners: list[Callable[[], None]] = []

    # --- any thread --------------------------------------------------------------------------------------------------

    def submit(self, record: RequestRecord, sink: Sink, attempt: int = 0, resume: Resume = FROM_THE_START) -> None:
        """Run or resume a record. `sink` is told whether it was accepted, and then everything that follows."""
        submission = Submission(record, sink, attempt, resume, self._clock())
        if not self._inbox.post(partial(self._admit, submission)):
            sink.rejected(record.request_id, attempt, stopped(), 0.0)

    def abort(self, request_id: str, choices: tuple[int, ...] = (), sink: Sink | None = None) -> None:
        """End a request, or some of its choices. With `sink`, only if its answers go to that sink."""
        self._inbox.post(partial(self._abort, request_id, choices, sink))

    def abandon(self, sink: Sink) -> None:
        """End every request whose answers go to `sink`, without telling it: its reader is gone."""
        self._inbox.post(partial(self._abandon, sink))

    def hand_back(self, reason: str) -> Future[None]:
        """Drain, and hand open requests back to their gateways."""
        return self.call(partial(self._hand_back, reason))

    def drain(self, reason: str) -> Future[None]:
        """Stop admitting: hand new requests back to their gateways. Open requests continue."""
        return self.call(partial(self._drain, reason))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the loop thread, between two passes."""
        return self._inbox.call(function)

    def load(self) -> Load:
        """The current load."""
        return msgspec.structs.replace(self._load, seconds_since_progress=self._clock() - self._progress_at)

    def on_load(self, listener: Callable[[], None]) -> None:
        """Have the loop thread call `listener` when `load` changes."""
        self._listeners.append(listener)

    @property
    def alive(self) -> bool:
        """Whether the loop still makes passes."""
        return not self._inbox.closed and self._clock() - self.passed_at < LOOP_STUCK_S

    # --- loop thread only; other threads go through `call` -----------------------------------------------------------

    def workers(self) -> list[WorkerView]:
        return views.workers(self._executor, self._router)

    def stats(self) -> Stats:
        return views.stats(self.load(), self._executor, self._router, self._totals)

    def reset_prefix_cache(self) -> int:
        """Forget cached blocks that no request uses, and return their number."""
        return sum(worker.scheduler.reset_prefix_cache() for worker in self._router.workers.values())

    def drain_worker(self, worker_id: str) -> None:
        """Ask a worker to leave once its requests have moved or ended. Raises PagodaError NOT_FOUND."""
        self._router.drain(worker_id, self._clock())

    def run(self, stop: threading.Event) -> None:
        """Body of the loop thread: passes until `stop` is set. After setting it, `call` something to wake the loop."""
        try:
            while not stop.is_set():
                self.step(IDLE_WAIT_S)
        finally:
            self.close()

    def step(self, timeout_s: float = IDLE_WAIT_S) -> bool:
        """Make one pass, waiting at most `timeout_s`. False if there was nothing to do."""
        self.passed_at = now = self._clock()
        busy, waited = self._inbox.drain(now), self._router.anybody_waits
        planned = self._plan(now)
        self._publish(busy or waited or self.idle)
        events = self._executor.wait(max(0.0, min(timeout_s, self._router.next_after(now) - self._clock())))
        held_up_s = self._guard.tick(now := self._clock())
        if held_up_s and self._executor.concurrent:  # else that was a step; forgive before judging
            self._router.forgive(held_up_s, now)
            self.admission.forgive(held_up_s, now)
        for event in events:
            self._handle(event, self._clock())
        self._audit(now := self._clock())
        self._publish(self._expire(now) or not all(isinstance(event, StepDone) for event in events))
        return busy or planned or bool(events)

    def close(self) -> None:
        """Hand all requests back and close the executor. Later submissions are rejected."""
        if self._inbox.close():
            self._inbox.drain(self._clock())
            self._hand_back("the engine core has stopped")
            self._executor.close()
            self._checker.close()

    @property
    def num_open(self) -> int:  # requests
        return len(self._answers) + self.admission.num_held

    @property
    def idle(self) -> bool:
        return not (self.num_open or len(self._inbox))

    def _plan(self, now: float) -> bool:
        """Plan the due steps, one per worker in turn, until no worker has anything to do."""
        planned = False
        while True:
            self._answers.emit(self._router.dispatch(self._rooms(now), now), now)
            if not sum([self._plan_step(worker, now) for worker in self._router.plannable(now)]):
                return planned
            planned = True

    def _plan_next(self, epoch: int, now: float) -> None:
        """Plan its next step without waiting for other workers' results, unless a request must be placed first."""
        worker = self._router.workers.get(epoch)
        if worker is not None and worker.next_at <= now and not (self._router.anybody_waits or len(self._inbox)):
            self._plan_step(worker, now)

    def _rooms(self, now: float) -> dict[int, Room]:
        """The room left on ready workers, by epoch; empty if no request waits for it."""
        plannable = self._router.plannable(now) if self._router.anybody_waits else []
        workers = [worker for worker in plannable if worker.ready]
        rooms = {worker.epoch: self._asked(worker, worker.scheduler.room, now) for worker in workers}
        return {epoch: room for epoch, room in rooms.items() if room is not None}

    def _asked(self, worker: Worker, ask: Callable[[], T], now: float) -> T | None:
        """Call into a worker's scheduler. If that raises, only its own state is broken: reset it and return None."""
        try:
            return ask()
        except Exception:  # noqa: BLE001 - see above
            self._reset(worker, LeaveCause.UNPLANNED, now)
            return None

    def _plan_step(self, worker: Worker, now: float) -> bool:
        plan = self._asked(worker, partial(worker.scheduler.schedule, now), now)
        if plan is not None:
            self._executor.send(worker.epoch, plan, worker.pace.deadline_s(plan.num_tokens))
            worker.pace.asked(plan.num_tokens, now)
            self._observer.planned(plan.num_tokens)
        return plan is not None

    def _handle(self, event: ExecutorEvent, now: float) -> None:
        match event:
            case StepDone():
                self._apply(event, now)
                self._plan_next(event.epoch, now)
            case WorkerJoined():
                self._join(event, now)
            case WorkerChanged():
                if (worker := self._router.workers.get(event.epoch)) is not None:
                    worker.change(event.state)
            case WorkerLeft():
                self._leave(event, now)

    def _apply(self, event: StepDone, now: float) -> None:
        if (worker := self._router.workers.get(event.epoch)) is None:
            return
        news = News()
        try:
            worker.scheduler.apply(event.result, now, news)
            num_tokens = self._router.stepped(worker, event.result.elapsed_s, now)
        except Exception as error:  # noqa: BLE001 - as in `_asked`, unless the worker answered what it was not asked
            self._take_news(worker, news, now)
            self._reset(worker, LeaveCause.RESET if isinstance(error, PagodaError) else LeaveCause.UNPLANNED, now)
            return
        self._progress_at = now
        self._totals["steps"] += 1
        self._observer.stepped(event.result.elapsed_s, event.result.forward_s)
        self._take_news(worker, news, now)
        self.admission.served(num_tokens, now, busy=len(self._answers) > 0, crowded=self._router.crowded)
        for usage in (delta.usage for delta in news.deltas if delta.usage is not None):
            self.admission.note_length(usage.output_tokens)

    def _take_news(self, worker: Worker, news: News, now: float) -> None:
        self._router.note_endings(worker, news.deltas)
        self._answers.emit_news(news, now)

    def _join(self, event: WorkerJoined, now: float) -> None:
        self._router.join(event.epoch, event.hello)
        if self.admission.limits is None:
            self._admit_held(self.admission.open(event.hello), now)

    def _leave(self, left: WorkerLeft, now: float) -> None:
        if (worker := self._router.workers.get(left.epoch)) is None:
            return
        try:
            deltas = self._router.leave(left, now)
        except Exception:  # its state is too broken to recover the requests, so they end here
            log.exception("the requests of epoch %d cannot be taken back", left.epoch)
            deltas = self._router.lose_track(worker, now)
        self._answers.emit(deltas, now)
        self.admission.interrupted()

    def _reset(self, worker: Worker, cause: LeaveCause, now: float) -> None:
        """Start afresh with this worker, and eventually without the request that makes its scheduler raise."""
        log.exception("the scheduler of epoch %d failed; its requests are replayed", worker.epoch)
        self._totals["scheduler_failures"] += 1
        self._leave(WorkerLeft(worker.epoch, cause, "its scheduler failed"), now)
        self._executor.send(worker.epoch, ResetWorker())

    def _expire(self, now: float) -> bool:
        if now - self._expired_at < EXPIRY_INTERVAL_S:
            return False
        self._expired_at = now
        for worker in [worker for worker in self._router.workers.values() if worker.leaves(now)]:
            self._leave(WorkerLeft(worker.epoch, LeaveCause.LEFT, "drained"), now)
            self._executor.send(worker.epoch, Drain())
        if not self._router.workers:
            needed = self._router.needed_numerics or self.admission.needed_numerics
            self._router.refused_numerics = self._executor.hold(needed)
        self._answers.emit(self._router.expire(now), now)
        for submission, error in self.admission.expire(now):
            self._answers.reject(submission, error)
        return True

    def _audit(self, now: float) -> None:
        """While idle, check the books of one worker that has run steps since its last audit."""
        if now - self._audited_at < AUDIT_INTERVAL_S or not self.idle:
            return
        self._audited_at = now
        if (worker := next((each for each in self._router.workers.values() if each.unaudited), None)) is not None:
            self._asked(worker, worker.audit, now)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _admit(self, submission: Submission, now: float) -> None:
        try:
            known = self._answers.get(submission.request_id)
            request = self.admission.admit(submission, known, self._router.num_waiting, self._router.queued_tokens, now)
            if request is None:
                return
            self._router.check_fits(request)
            if known is None and self._router.must_wait(ahead := self._router.ahead_of(request)):
                self.admission.check_wait(request, ahead)
        except PagodaError as error:
            self._reject(submission, error)
            return
        except Exception as error:  # a record that cannot be checked must not affect other requests
            log.exception("cannot admit request %r", submission.request_id)
            self._reject(submission, PagodaError(ErrorCode.INTERNAL, f"cannot admit this request: {error}"))
            return
        if known is not None:
            self._end(submission.request_id, (), now)
        request.number_streams(self._answers.accept(submission))
        try:
            deltas = request.settle(now)
            if not request.ended:
                self._router.add(request, now)
        except Exception:  # nor must one that cannot be queued
            log.exception("cannot queue request %r", submission.request_id)
            deltas = request.lose_track(now)
        self._answers.emit(deltas, now)

    def _admit_held(self, several: list[HeldSubmission], now: float) -> None:
        for held in several:
            self._admit(held.submission, now)
            if held.aborted:
                self._abort(held.submission.request_id, tuple(held.aborted), held.submission.sink, now)

    def _grammar_checked(self, grammar: str, verdict: Verdict) -> None:
        """Called by the checker's thread."""
        self._inbox.post(partial(self._take_verdict, grammar, verdict))

    def _take_verdict(self, grammar: str, verdict: Verdict, now: float) -> None:
        for held in self.admission.judged(grammar, verdict, now):
            if verdict.error is None or verdict.tenant not in (None, held.submission.record.tenant):
                self._admit_held([held], now)
            else:
                self._reject(held.submission, verdict.error.anew())

    def _reject(self, submission: Submission, error: PagodaError) -> None:
        retry_after_s, router = 0.0, self._router
        if error.code is ErrorCode.OVERLOADED:
            retry_after_s = self.admission.seconds_for(router.queued_tokens, router.num_waiting, router.num_running)
        self._answers.reject(submission, error, retry_after_s)

    def _abort(self, request_id: str, choices: tuple[int, ...], sink: Sink | None, now: float) -> None:
        withdrawn = self.admission.withdraw(request_id, choices, sink)
        if withdrawn is not None:
            self._answers.reject(withdrawn, PagodaError(ErrorCode.CANCELLED, "aborted before it was admitted"))
        running = self._answers.get(request_id)
        if running is not None and (sink is None or running.sink is sink):
            self._answers.emit(self._end(request_id, choices, now), now)

    def _end(self, request_id: str, choices: tuple[int, ...], now: float) -> list[Delta]:
        """Abort choices, or all, on the worker or in the queue, to which a request returns if its scheduler raises."""
        abort = partial(self._router.abort, request_id, choices, now)
        worker = self._router.holder(request_id)
        deltas = None if worker is None else self._asked(worker, abort, now)
        return abort() if deltas is None else deltas

    def _abandon(self, sink: Sink, now: float) -> None:
        self.admission.forget(sink)
        for request_id in self._answers.forget(sink):
            self._end(request_id, (), now)
            self._totals["requests_abandoned"] += 1

    def _drain(self, reason: str) -> None:
        for held in self.admission.close(reason):
            self._reject(held.submission, Draining(reason))

    def _hand_back(self, reason: str) -> None:
        self._drain(reason)
        self._router.take_all(self._clock())
        self._answers.migrate_all(reason)

    def _publish(self, load_too: bool) -> None:
        """Publish answers and, if `load_too`, a changed load; steps alone change it too often to publish each time."""
        self._answers.publish()
        while self._answers.failed:
            self._abandon(self._answers.failed.pop(), self._clock())
        if not load_too:
            return
        load = views.load_of(self._load.engine_id, self._config.policy, self._router, self.admission)
        if load != self._load:
            self._load = load
            for listener in self._listeners:
                listener()
