"""One thread changes everything, one pass at a time: drain inbox, place, schedule, send, wait, apply, publish.

Other threads only append to the inbox and read snapshots. What goes wrong about one request ends that request; what
goes wrong in one group's scheduler costs that group its state, and its requests are replayed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from pagoda_engine_core.admission import FrontDoor
from pagoda_engine_core.answers import Answers, NoObserver, Observer, Sink, Submission
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.counters import sum_blocks
from pagoda_engine_core.executor import (
    Executor,
    ExecutorEvent,
    LeaveCause,
    StepDone,
    WorkerChanged,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerState,
)
from pagoda_engine_core.request import Request
from pagoda_engine_core.router import Group, Router
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, Load, PriorOutput, RequestRecord
from pagoda_proto.steps import Drain, ResetWorker

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_WAIT_S = 0.25
EXPIRY_INTERVAL_S = 0.1
STUCK_AFTER_S = 10.0
"""A loop that has not come round for this long is stuck."""


class WorkerView(NamedTuple):
    """A worker's life, and what the engine core has placed there."""

    info: WorkerInfo
    num_free_blocks: int
    num_rows: int


class Stats(NamedTuple):
    """Numbers of this moment, and totals since the engine core started."""

    load: Load
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    swap_blocks_total: int
    swap_blocks_used: int
    totals: dict[str, int]


class EngineCore:
    """What is accepted here gets exactly one ending here, whatever happens to workers and requests.

    `executor` is owned and closed by `close`; `clock` gives monotonic seconds. Either one thread is in `run`, or the
    caller's own thread calls `step`; `submit`, `abort`, `abandon`, `hand_back`, `call`, `load` and `alive` are for any.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        *,
        engine_id: str = "",
        observer: Observer | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._clock = clock
        self._observer = observer or NoObserver()
        self._router = Router(config)
        self._door = FrontDoor(config, clock())
        self._answers = Answers(self._observer)
        self._inbox: deque[Callable[[float], None]] = deque()
        self._inbox_lock = threading.Lock()
        self._closed = False
        self._totals: Counter[str] = Counter()
        self._progress_at = self._passed_at = self._expired_at = clock()
        self._load = Load(engine_id=engine_id or secrets.token_hex(8))
        self._model_fingerprint = ""
        self._listeners: list[Callable[[], None]] = []

    # --- any thread --------------------------------------------------------------------------------------------------

    def submit(self, record: RequestRecord, sink: Sink, attempt: int = 0, prior: Iterable[PriorOutput] = ()) -> None:
        """Run a record, or go on with it: `sink` is told whether it was accepted, and everything after."""
        submission = Submission(record, sink, attempt, tuple(prior), self._clock())
        if not self._post(partial(self._admit, submission)):
            sink.rejected(record.request_id, attempt, _stopped(), 0.0)

    def abort(self, request_id: str, choices: tuple[int, ...] = (), sink: Sink | None = None) -> None:
        """End a request, or some of its choices. With `sink`, only if that is where its answers go."""
        self._post(partial(self._abort, request_id, choices, sink))

    def abandon(self, sink: Sink) -> None:
        """End every request whose answers go to `sink`; nobody is there to be told."""
        self._post(partial(self._abandon, sink))

    def hand_back(self, reason: str) -> Future[None]:
        """Admit nothing from now on, and give every request back to where it came from."""
        return self.call(partial(self._hand_back, reason))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two passes, by the thread that may change things."""
        future: Future[T] = Future()
        if not self._post(lambda _: _resolve(future, function)):
            future.set_exception(_stopped())
        return future

    def load(self) -> Load:
        """The state of this moment."""
        return msgspec.structs.replace(self._load, seconds_since_progress=self._clock() - self._progress_at)

    def on_load(self, listener: Callable[[], None]) -> None:
        """Have the loop's thread call `listener` when `load` has something new to say."""
        self._listeners.append(listener)

    @property
    def alive(self) -> bool:
        """Whether the loop comes round."""
        return not self._closed and self._clock() - self._passed_at < STUCK_AFTER_S

    def _post(self, item: Callable[[float], None]) -> bool:
        with self._inbox_lock:
            if self._closed:
                return False
            self._inbox.append(item)
        self._executor.wake()
        return True

    # --- the loop's thread: through `call`, if from elsewhere --------------------------------------------------------

    def workers(self) -> list[WorkerView]:
        views = []
        for info in self._executor.workers():
            group = self._router.groups.get(info.epoch)
            used = group.scheduler.counters.blocks_used if group else 0
            rows = group.scheduler.num_rows if group else 0
            views.append(WorkerView(info, info.hello.num_blocks - used if info.state.alive else 0, rows))
        return views

    def stats(self) -> Stats:
        counters = [group.scheduler.counters for group in self._router.groups.values()]
        totals = Counter(self._totals) + self._router.totals() + Counter(self._executor.counters())
        return Stats(load=self.load(), totals=dict(totals), **sum_blocks(counters))

    def reset_prefix_cache(self) -> int:
        """Forget cached blocks that no request uses; how many those were."""
        return sum(group.scheduler.reset_prefix_cache() for group in self._router.groups.values())

    def drain_worker(self, worker_id: str) -> None:
        """Ask a worker to leave; its requests continue elsewhere, or wait for another. PagodaError NOT_FOUND."""
        groups = [group for group in self._router.groups.values() if group.hello.worker_id == worker_id]
        if not groups:
            raise PagodaError(ErrorCode.NOT_FOUND, f"no worker {worker_id!r} is at work here", "worker_id")
        for group in groups:
            self._leave(group.epoch, LeaveCause.LEFT, self._clock())
            self._executor.send(group.epoch, Drain())

    def run(self, stop: threading.Event) -> None:
        """The loop thread's life: passes until `stop` is set. `call` something afterwards to be noticed at once."""
        try:
            while not stop.is_set():
                self.step(IDLE_WAIT_S)
        finally:
            self.close()

    def step(self, timeout_s: float = IDLE_WAIT_S) -> bool:
        """One pass; waits for at most `timeout_s`. False when there was nothing to do."""
        self._passed_at = now = self._clock()
        busy = self._drain_inbox(now)
        self._answers.emit(self._router.dispatch(now), now)
        busy |= self._plan(now)
        self._publish()
        events = self._executor.wait(timeout_s)
        now = self._clock()
        for event in events:
            self._handle(event, now)
        self._expire(now)
        self._publish()
        return busy or bool(events)

    def close(self) -> None:
        """Hand everything back and let the executor go. Whatever is submitted later is rejected."""
        with self._inbox_lock:
            if self._closed:
                return
            self._closed = True
        self._drain_inbox(self._clock())
        self._hand_back("the engine core has stopped")
        self._executor.close()

    @property
    def idle(self) -> bool:
        """Whether no request is live and nothing is in the inbox."""
        return not (len(self._answers) or self._door.num_held or self._inbox)

    def _drain_inbox(self, now: float) -> bool:
        count = len(self._inbox)  # what is posted meanwhile has to wait for the next pass
        for _ in range(count):
            self._inbox.popleft()(now)
        return count > 0

    def _plan(self, now: float) -> bool:
        planned = False
        for group in self._router.ready():
            try:
                planned |= self._plan_group(group, now)
            except Exception:  # noqa: BLE001 - one group's state is broken; the others and the engine core go on
                self._reset(group, now)
        return planned

    def _plan_group(self, group: Group, now: float) -> bool:
        planned = False
        while group.scheduler.steps_in_flight < self._config.max_steps_in_flight:
            plan = group.scheduler.schedule(now)
            if plan is None:
                break
            self._executor.send(group.epoch, plan)
            self._observer.planned(plan.num_tokens)
            self._door.computed(plan.num_tokens, now)
            planned = True
        return planned

    def _handle(self, event: ExecutorEvent, now: float) -> None:
        match event:
            case StepDone():
                self._apply(event, now)
            case WorkerJoined():
                self._join(event, now)
            case WorkerChanged():
                group = self._router.groups.get(event.epoch)
                if group is not None:
                    group.state = event.state
            case WorkerLeft():
                self._leave(event.epoch, event.cause, now)

    def _apply(self, event: StepDone, now: float) -> None:
        group = self._router.groups.get(event.epoch)
        if group is None:
            return
        try:
            deltas = group.scheduler.apply(event.result, now)
        except Exception:  # noqa: BLE001 - as in `_plan`; or the worker answered what it was not asked
            self._reset(group, now)
            return
        self._progress_at = now
        self._totals["steps"] += 1
        self._observer.stepped(event.result.elapsed_s, event.result.forward_s)
        self._answers.emit(self._router.ended(group, deltas), now)

    def _join(self, event: WorkerJoined, now: float) -> None:
        self._router.join(event.epoch, event.hello)
        if self._door.limits is None:
            self._model_fingerprint = event.hello.model_fingerprint
            for submission in self._door.open(event.hello):
                self._admit(submission, now)

    def _leave(self, epoch: int, cause: LeaveCause, now: float) -> None:
        group = self._router.groups.get(epoch)
        if group is None:
            return
        try:
            deltas = self._router.leave(epoch, cause, now)
        except Exception:  # its state is too broken to be taken back; its requests end here
            log.exception("the requests of epoch %d cannot be taken back", epoch)
            lost = [request for name, request in group.requests.items() if not self._router.is_waiting(name)]
            deltas = [delta for request in lost for delta in _fail_internal(request, now)]
        self._answers.emit(deltas, now)

    def _reset(self, group: Group, now: float) -> None:
        """Begin anew with this worker. The requests it ran count a death, so that none can do this for ever."""
        log.exception("the scheduler of epoch %d failed; its requests are replayed", group.epoch)
        self._totals["scheduler_failures"] += 1
        self._leave(group.epoch, LeaveCause.RESET, now)
        self._executor.send(group.epoch, ResetWorker())

    def _expire(self, now: float) -> None:
        if now - self._expired_at < EXPIRY_INTERVAL_S:
            return
        self._expired_at = now
        self._answers.emit(self._router.expire(now), now)
        for submission, error in self._door.expire(now):
            self._answers.reject(submission, error)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _admit(self, submission: Submission, now: float) -> None:
        try:
            running = self._answers.get(submission.request_id)
            num_waiting, num_tokens = self._router.num_waiting, self._router.queued_tokens
            request = self._door.admit(submission, running, num_waiting, num_tokens)
            if request is None:
                return
            self._router.check_fits(request)
        except PagodaError as error:
            self._reject(submission, error)
            return
        except Exception as error:  # a record that we cannot judge harms nobody else
            log.exception("cannot admit request %r", submission.request_id)
            self._reject(submission, PagodaError(ErrorCode.INTERNAL, f"cannot admit this request: {error}"))
            return
        if running is not None:
            self._router.abort(submission.request_id, (), now)
        self._answers.accept(submission)
        deltas = request.settle(now)
        if not request.ended:
            self._router.add(request, now)
        self._answers.emit(deltas, now)

    def _reject(self, submission: Submission, error: PagodaError) -> None:
        overloaded = error.code is ErrorCode.OVERLOADED
        retry_after_s = self._door.seconds_for(self._router.queued_tokens) if overloaded else 0.0
        self._answers.reject(submission, error, retry_after_s)

    def _abort(self, request_id: str, choices: tuple[int, ...], sink: Sink | None, now: float) -> None:
        held = None if choices else self._door.withdraw(request_id, sink)
        if held is not None:
            self._answers.reject(held, PagodaError(ErrorCode.CANCELLED, "aborted before a worker was there"))
        running = self._answers.get(request_id)
        if running is not None and (sink is None or running.sink is sink):
            self._answers.emit(self._router.abort(request_id, choices, now), now)

    def _abandon(self, sink: Sink, now: float) -> None:
        self._door.forget(sink)
        for request_id in self._answers.forget(sink):
            self._router.abort(request_id, (), now)
            self._totals["requests_abandoned"] += 1

    def _hand_back(self, reason: str) -> None:
        self._router.take_all(self._clock())
        for submission in self._door.close():
            self._answers.reject(submission, PagodaError(ErrorCode.UNAVAILABLE, reason))
        self._answers.migrate_all(reason)

    def _publish(self) -> None:
        self._answers.publish()
        while self._answers.failed:
            self._abandon(self._answers.failed.pop(), self._clock())
        load = self._current_load()
        if load != self._load:
            self._load = load
            for listener in self._listeners:
                listener()

    def _current_load(self) -> Load:
        router, limits = self._router, self._door.limits
        return Load(
            engine_id=self._load.engine_id,
            num_workers=sum(group.state is WorkerState.READY for group in router.groups.values()),
            num_waiting=router.num_waiting + self._door.num_held,
            num_running=router.num_running,
            kv_usage=round(router.kv_usage, 3),
            draining=self._door.closed,
            vocab_size=limits.vocab_size if limits else 0,
            max_model_len=limits.max_model_len if limits else 0,
            model_fingerprint=self._model_fingerprint,
        )


def _stopped() -> PagodaError:
    return PagodaError(ErrorCode.UNAVAILABLE, "the engine core has stopped")


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - it is the caller's to see
        future.set_exception(error)


def _fail_internal(request: Request, now: float) -> list[Delta]:
    return request.fail(ErrorCode.INTERNAL, "the scheduler lost track of this request", now)
