"""The worker process: load, register, execute plans in order, leave.

Every fault between engine core and worker has one remedy: forget all rows and register again over new connections. The
weights stay loaded, and the engine core has the record of every row. So a lost lease, a link that drops messages, a gap
in the steps, a step that raised, a reset and a restarted engine core all take one branch: leave `_serve` and begin the
next `Registration`.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import zmq

from pagoda_proto import times
from pagoda_proto.addresses import host_id
from pagoda_proto.channel import MAX_ID_BYTES
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.steps import (
    PROTOCOL_VERSION,
    Drain,
    Goodbye,
    Hello,
    Refused,
    ResetWorker,
    StepFailed,
    StepPlan,
    ToWorker,
    Welcome,
)
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.control import NO_SIGNS, Progress, Signs
from pagoda_worker.process.departure import Departure
from pagoda_worker.process.registration import POLL_S, Registration
from pagoda_worker.process.step_budget import MIN_TOKENS, StepBudget
from pagoda_worker.process.wire import local_or_encrypted
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import MAX_PENDING, LostStep, ModelRunner
from pagoda_worker.step.table import RunnerFacts

log = logging.getLogger(__name__)

Report = Callable[[dict[str, object]], None]

REPORT_EVERY_S = 0.25  # between reports of loading progress
TOLD_EVERY = 256  # attempts without an answer: about an hour of them
PENDING_POLL_S = 0.001  # how soon the loop notices that a step on a device has ended


@dataclass(frozen=True)
class Identity:
    """This process: a stable name, 64 random bits of its own, and how long it took to become ready."""

    worker_id: str
    incarnation: str
    start_s: float = 0.0

    @classmethod
    def of_this_process(cls, worker_id: str = "", start_s: float = 0.0) -> Identity:
        """Raises ValueError if the name cannot be sent."""
        name = worker_id or f"{platform.node()[:64]}-{os.getpid()}"
        if not name.isprintable() or len(name.encode()) > MAX_ID_BYTES:
            raise ValueError(f"worker_id: must have 1 to {MAX_ID_BYTES} printable bytes, got {name[:200]!r}")
        return cls(name, secrets.token_hex(8), start_s)

    def hello(self, facts: RunnerFacts, registration: int = 1) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            registration=registration,
            host_id=host_id(),
            pid=os.getpid(),
            start_s=self.start_s,
            **asdict(facts),
        )


class _StoppedError(Exception):
    """The process was asked to end while it was loading."""


def run(config: WorkerConfig, report: Report, stop: threading.Event) -> None:
    """Run the worker process from start to end.

    Args:
        config: What to serve, and the engine core to serve.
        report: Called with events: {"event": "loading", "bytes", "of"}, {"event": "recording", "graphs", "of"} on a
            GPU, {"event": "loaded", "seconds", "num_blocks"}, {"event": "registering"} when no engine core knows this
            worker, {"event": "ready", "epoch"} when one does.
        stop: Once it is set, the worker announces that it leaves, continues its rows until the engine core has moved
            them or `drain_timeout_s` has passed, sends Goodbye and returns.

    Raises:
        ValueError: the model, the address, its keys, the worker's name or a file named by an option cannot be used.
        PagodaError: the engine core refused this worker for good.
        RuntimeError: the model failed on its first token, or the device is lost.
    """
    local_or_encrypted(config.engine, Identity.of_this_process(config.worker_id).worker_id, config.keys_dir)
    signs = Signs.of(config)
    # Importing model code takes long, so a bad address has been reported above.
    from pagoda_worker.process.models import kept_s
    from pagoda_worker.process.startup import load_runner

    started = time.monotonic() - kept_s(config)

    def recording(done: int, of: int) -> None:
        if stop.is_set():
            raise _StoppedError
        report({"event": "recording", "graphs": done, "of": of})

    try:
        runner = load_runner(config, _telling(report, stop), recording)
    except _StoppedError:
        return
    start_s = time.monotonic() - started
    report({"event": "loaded", "seconds": start_s, "num_blocks": runner.facts.num_blocks})
    serve(runner, config, report, stop, start_s, signs)


def load_for_forks(config: WorkerConfig, report: Report) -> None:
    """Load what `run` would, for workers that will be forked off this process; see `keep_models`."""
    from pagoda_worker.process.models import keep_models

    keep_models(config, _telling(report, threading.Event()))


def _telling(report: Report, stop: threading.Event) -> Callable[[int, int], None]:
    """The progress callback for loading (bytes loaded, bytes in all); it raises _StoppedError once `stop` is set."""
    told_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told_at
        if stop.is_set():
            raise _StoppedError
        if done == total or time.monotonic() - told_at >= REPORT_EVERY_S:
            told_at = time.monotonic()
            report({"event": "loading", "bytes": done, "of": total})

    return progress


def serve(
    runner: ModelRunner,
    config: WorkerConfig,
    report: Report,
    stop: threading.Event,
    start_s: float = 0.0,
    signs: Signs = NO_SIGNS,
) -> None:
    """Serve the engine core at `config.engine` until it dismisses this worker or `stop` is set: see `run`.

    Raises:
        ValueError: the address, its keys or the worker's name cannot be used.
        PagodaError: the engine core refused this worker for good.
        torch.AcceleratorError: the device is lost.
    """
    identity = Identity.of_this_process(config.worker_id, start_s)
    link = local_or_encrypted(config.engine, identity.worker_id, config.keys_dir)
    progress, departure = Progress(), Departure(stop, config.drain_timeout_s)
    with zmq.Context(io_threads=1) as context:

        def connect(hello: Hello) -> Registration:
            return Registration(context, link, hello, progress, departure, signs)

        StepLoop(runner, identity, connect, progress, departure).run(report, stop)


class StepLoop:
    """The worker's side of the data connection, run by one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        identity: Identity,
        connect: Callable[[Hello], Registration],
        progress: Progress,
        departure: Departure,
    ) -> None:
        self._runner = runner
        self._identity = identity
        self._connect = connect
        self._progress = progress
        self._departure = departure
        whole = 0 if runner.facts.num_blocks else runner.facts.max_model_len  # a prompt must fit in one step
        self._budget = StepBudget(runner.facts.max_tokens_per_step, max(MIN_TOKENS, whole))
        self._next_step = 1
        self._pending: deque[Pending] = deque()  # launched and not answered, oldest first

    def run(self, report: Report, stop: threading.Event) -> None:
        number = failed = 0  # registrations so far; consecutive ones without a Welcome
        while not self._departure.announced:
            number += 1
            if not failed:
                report({"event": "registering"})
            with self._connect(self._hello(number)) as registration:
                answer = registration.ask(times.hello_answer_s(failed), lambda: self._departure.announced)
                if isinstance(answer, Welcome):
                    self._live(registration, answer, report)
                elif answer is None and _worth_a_line(failed + 1) and not self._departure.announced:
                    log.warning("no engine core answers at %s; retrying", registration.why_unanswered)
            failed = 0 if isinstance(answer, Welcome) else failed + 1
            if isinstance(answer, Refused):
                stop.wait(_pause_s(answer, failed))

    def _hello(self, number: int) -> Hello:
        offered = self._budget.offered(time.monotonic())
        return self._identity.hello(replace(self._runner.facts, max_tokens_per_step=offered), number)

    def _live(self, registration: Registration, welcome: Welcome, report: Report) -> None:
        """Serve one registration, from its Welcome until it is over."""
        standing = registration.admit(welcome)
        log.info("registered as epoch %d of engine core %s", standing.epoch, standing.boot_id)
        report({"event": "ready", "epoch": standing.epoch})
        try:
            self._serve(registration)
        except LostStep as lost:
            self._tell_lost(registration, lost)
        if not registration.over:
            registration.send(Goodbye(reason=self._departure.reason))
        elif not self._departure.announced:
            log.warning("forgetting all rows and registering again: %s", registration.why_over)
        self._forget()

    def _tell_lost(self, registration: Registration, lost: LostStep) -> None:
        if lost.out_of_memory:
            self._budget.ran_out(time.monotonic())
            log.error("a lower gpu_memory_utilization, max_tokens_per_step or max_rows leaves more room")
        if not registration.over:
            registration.send(StepFailed(step=lost.step, reason=lost.reason))
        registration.lose(str(lost))

    def _serve(self, registration: Registration) -> None:
        """Execute plans until this standing is over or the worker is due to leave.

        A finished step is answered before anything else. While a device computes one, the next is launched as soon as
        its plan arrives, so that the device does not wait for the host.
        """
        self._next_step, heard_at = 1, time.monotonic()
        while not self._departure.due(time.monotonic(), self._runner.num_rows):
            while self._pending and (self._pending[0].done or len(self._pending) == MAX_PENDING):
                self._answer(registration)
            if registration.over:
                return
            now = time.monotonic()
            message = registration.receive(PENDING_POLL_S if self._pending else POLL_S)
            if message is not None:
                heard_at = now
                self._take(message, registration)
            elif not self._pending and now - heard_at > times.IDLE_S and self._may_offer_more(registration, now):
                registration.lose("idle, and larger steps can be offered again")
        while self._pending:
            self._answer(registration)

    def _may_offer_more(self, registration: Registration, now: float) -> bool:
        return self._budget.offered(now) > registration.hello.max_tokens_per_step

    def _take(self, message: ToWorker, registration: Registration) -> None:
        match message:
            case StepPlan() as plan if plan.step == self._next_step:
                self._next_step += 1
                self._launch(plan)
            case StepPlan() as plan:
                registration.lose(f"step {plan.step} came when {self._next_step} was due")
            case ResetWorker():
                registration.lose("reset by the engine core")
            case Drain():
                self._departure.dismiss()
            case Refused() as refused:
                registration.lose(f"refused: {refused.reason}")

    def _launch(self, plan: StepPlan) -> None:
        if not self._pending:
            self._progress.busy_since = time.monotonic()
        self._pending.append(self._runner.launch(plan))

    def _answer(self, registration: Registration) -> None:
        """Answer the oldest step; the answer is discarded if the lease ran out meanwhile and the standing is over."""
        result = self._runner.collect(self._pending.popleft())
        self._progress.busy_since = time.monotonic() if self._pending else None
        if not registration.over and not registration.send(result):
            registration.lose(f"the result of step {result.step} could not be sent")

    def _forget(self) -> None:
        """Drop all rows and pending steps. If a device never ends them, we stay busy here and the process is ended."""
        self._pending.clear()
        self._runner.reset()
        self._progress.busy_since = None


def _worth_a_line(failed: int) -> bool:
    """Whether to log this attempt without an answer: the first, then ever fewer of them, since a wait may be long and
    its cause fits one line."""
    return failed.bit_count() == 1 or failed % TOLD_EVERY == 0


def _pause_s(refused: Refused, times_refused: int) -> float:
    """How long to wait before the next attempt.

    Raises:
        PagodaError: trying again cannot help.
    """
    if refused.final:
        raise PagodaError(ErrorCode.UNAVAILABLE, f"the engine core refuses this worker: {refused.reason}")
    pause_s = times.hello_pause_s(times_refused)
    log.warning("registration refused, trying again in %.0f s: %s", pause_s, refused.reason)
    return pause_s
