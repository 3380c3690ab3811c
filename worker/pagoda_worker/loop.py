"""The worker process: load, register, execute plans in order, leave.

Whatever goes wrong between engine core and worker has one remedy: forget all rows and register anew. The weights stay,
and the engine core has every row's record. So a lost lease, a gap in the steps, a reset and a restarted engine core are
one branch: leave `_serve`, say Hello.
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
from dataclasses import asdict, dataclass

import zmq

from pagoda_proto.channel import MAX_ID_BYTES, FrameError, decode_to_worker
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.host import host_id
from pagoda_proto.steps import (
    PROTOCOL_VERSION,
    Drain,
    Goodbye,
    Hello,
    Refused,
    ResetWorker,
    StepPlan,
    ToWorker,
    Welcome,
)
from pagoda_worker.config import WorkerConfig
from pagoda_worker.control import Control, Membership, Progress, Standing
from pagoda_worker.pending import Pending
from pagoda_worker.runner import MAX_PENDING, ModelRunner
from pagoda_worker.table import RunnerFacts
from pagoda_worker.wire import Wire, local_or_encrypted

log = logging.getLogger(__name__)

Report = Callable[[dict[str, object]], None]

POLL_S = 0.1  # how soon a loop that waits notices stop, drain and a lost lease
PENDING_POLL_S = 0.001  # how soon it notices that a step on a device is over
HELLO_INTERVAL_S = 1.0
MAX_HELLO_INTERVAL_S = 10.0
SEND_TIMEOUT_S = 1.0
GOODBYE_LINGER_S = 0.5


@dataclass(frozen=True)
class Identity:
    """Who this process is: a stable name, and 64 random bits of its own."""

    worker_id: str
    incarnation: str

    @classmethod
    def of_this_process(cls, worker_id: str = "") -> Identity:
        """Raises ValueError for a name that cannot be sent."""
        name = worker_id or f"{platform.node()[:64]}-{os.getpid()}"
        if not name.isprintable() or len(name.encode()) > MAX_ID_BYTES:
            raise ValueError(f"worker_id: 1 to {MAX_ID_BYTES} printable bytes are needed, got {name[:200]!r}")
        return cls(name, secrets.token_hex(8))

    def hello(self, facts: RunnerFacts) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            registration=1,
            host_id=host_id(),
            pid=os.getpid(),
            **asdict(facts),
        )


class _StoppedError(Exception):
    """The process was asked to end while it was loading."""


def run(config: WorkerConfig, report: Report, stop: threading.Event) -> None:
    """The worker process from start to end.

    Args:
        config: What to serve and for whom.
        report: Called with events: {"event": "loading", "bytes", "of"}, {"event": "recording", "graphs", "of"} on a
            GPU, {"event": "loaded", "seconds", "num_blocks"}, {"event": "registering"} when no engine core
            knows this worker, {"event": "ready", "epoch"} when one does.
        stop: Once it is set the worker ends the step it is in, says Goodbye and returns.

    Raises:
        ValueError: the model, the address, its keys or the worker's name cannot be used.
        PagodaError: the engine core refused this worker for good.
        RuntimeError: the model failed on its first token, or the device is lost.
    """
    local_or_encrypted(config.engine, Identity.of_this_process(config.worker_id).worker_id, config.keys_dir)
    from pagoda_worker.startup import load_runner  # model code takes long to import; a bad address is told before

    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        if stop.is_set():
            raise _StoppedError
        report({"event": "loading", "bytes": done, "of": total})

    def recording(done: int, of: int) -> None:
        if stop.is_set():
            raise _StoppedError
        report({"event": "recording", "graphs": done, "of": of})

    try:
        runner = load_runner(config, progress, recording)
    except _StoppedError:
        return
    report({"event": "loaded", "seconds": time.monotonic() - started, "num_blocks": runner.facts.num_blocks})
    serve(runner, config, report, stop)


def serve(runner: ModelRunner, config: WorkerConfig, report: Report, stop: threading.Event) -> None:
    """Serve the engine core at `config.engine` until `stop` is set or it asks this worker to leave.

    Raises:
        ValueError: the address, its keys or the worker's name cannot be used.
        PagodaError: the engine core refused this worker for good.
        torch.AcceleratorError: the device is lost.
    """
    identity = Identity.of_this_process(config.worker_id)
    link = local_or_encrypted(config.engine, identity.worker_id, config.keys_dir)
    membership, progress = Membership(), Progress()
    with zmq.Context(io_threads=1) as context:
        wire = Wire(context, link, f"{identity.incarnation}/d")
        linger_s = 0.0
        try:
            with Control(context, link, identity.incarnation, membership, progress, config.alive_file) as control:
                StepLoop(runner, identity.hello(runner.facts), wire, membership, progress, control).run(report, stop)
            linger_s = GOODBYE_LINGER_S
        finally:
            wire.close(linger_s)


class StepLoop:
    """The data connection's side of the worker, run by one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        hello: Hello,
        wire: Wire,
        membership: Membership,
        progress: Progress,
        control: Control,
    ) -> None:
        self._runner = runner
        self._hello = hello
        self._wire = wire
        self._membership = membership
        self._progress = progress
        self._control = control
        self._next_step = 1
        self._pending: deque[Pending] = deque()  # launched and not answered, oldest first

    def run(self, report: Report, stop: threading.Event) -> None:
        def leaving() -> bool:
            self._control.check()
            return stop.is_set() or self._control.drain.is_set()

        welcome: Welcome | None = None
        while not leaving():
            if welcome is None:
                report({"event": "registering"})
                welcome = self._register(leaving)
                continue
            standing = self._membership.admit(welcome, time.monotonic())
            log.info("registered as epoch %d of engine core %s", *reversed(standing))
            report({"event": "ready", "epoch": standing.epoch})
            welcome = self._serve(standing, leaving)
            self._forget()
        self._say_goodbye("drained" if self._control.drain.is_set() else "stopped")

    def _register(self, leaving: Callable[[], bool]) -> Welcome | None:
        """Say Hello until the engine core answers; None when this worker is to leave instead."""
        interval_s, next_hello = HELLO_INTERVAL_S, 0.0
        while not leaving():
            now = time.monotonic()
            if now >= next_hello and self._control.connected.wait(POLL_S) and self._wire.send(self._hello):
                next_hello = now + interval_s
            frame = self._wire.receive(POLL_S)
            match self._decode(frame[1]) if frame else None:
                case Welcome() as welcome:
                    return welcome
                case Refused() as refused:
                    if refused.final:
                        raise PagodaError(
                            ErrorCode.UNAVAILABLE, f"the engine core refuses this worker: {refused.reason}"
                        )
                    log.warning("registration refused, trying again in %.0f s: %s", interval_s, refused.reason)
                    next_hello = time.monotonic() + interval_s
                    interval_s = min(2 * interval_s, MAX_HELLO_INTERVAL_S)
        return None

    def _serve(self, standing: Standing, leaving: Callable[[], bool]) -> Welcome | None:
        """Execute plans until this standing is over; a newer Welcome that came without being asked for is returned.

        A step that is over is answered before anything else. While one is under way on a device the next is launched
        as soon as its plan comes, so that the device does not wait for the host.
        """
        self._next_step = 1
        while not leaving():
            if self._membership.standing(time.monotonic()) != standing:
                log.warning("forgetting all rows and registering anew: %s", self._membership.why_lost)
                return None
            if self._pending and (self._pending[0].done or len(self._pending) == MAX_PENDING):
                self._answer(standing)
                continue
            message = self._next_message(standing, PENDING_POLL_S if self._pending else POLL_S)
            if isinstance(message, Welcome):
                return message
            self._take(message, standing)
        while self._pending:
            self._answer(standing)
        return None

    def _take(self, message: ToWorker | None, standing: Standing) -> None:
        match message:
            case StepPlan() as plan if plan.step == self._next_step:
                self._next_step += 1
                self._launch(plan)
            case StepPlan() as plan:
                self._membership.lose(standing, f"step {plan.step} came when {self._next_step} was due")
            case ResetWorker():
                self._membership.lose(standing, "reset by the engine core")
            case Drain():
                self._control.drain.set()
            case Refused() as refused:
                self._membership.lose(standing, f"refused: {refused.reason}")

    def _next_message(self, standing: Standing, timeout_s: float) -> ToWorker | None:
        """The next frame of this standing, or a Welcome of a later one; everything else is dropped undecoded."""
        frame = self._wire.receive(timeout_s)
        if frame is None:
            return None
        envelope, payload = frame
        if standing.covers(envelope):
            if not self._membership.heard(standing, time.monotonic()):
                return None  # it waited while this process could not run
            message = self._decode(payload)
            if message is None:
                self._membership.lose(standing, "a frame could not be read")
            return message
        if envelope.engine_boot_id == standing.boot_id and envelope.epoch > standing.epoch:
            later = self._decode(payload)
            if isinstance(later, Welcome):
                return later
        self._wire.drop(f"it is of epoch {envelope.epoch} of engine core {envelope.engine_boot_id!r}, not {standing}")
        return None

    def _launch(self, plan: StepPlan) -> None:
        if not self._pending:
            self._progress.busy_since = time.monotonic()
        self._pending.append(self._runner.launch(plan))

    def _answer(self, standing: Standing) -> None:
        """Answer the oldest step. The answer is discarded if the lease ran out meanwhile, and the standing is over."""
        result = self._runner.collect(self._pending.popleft())
        now = time.monotonic()
        self._progress.busy_since = now if self._pending else None
        self._progress.steps_done += 1
        if self._membership.standing(now) != standing:
            return
        if not self._wire.send(result, *standing, timeout_s=SEND_TIMEOUT_S):
            self._membership.lose(standing, f"the result of step {result.step} could not be sent")

    def _forget(self) -> None:
        """Drop all rows and the steps under way. A device that never ends them leaves us busy: the process ends."""
        self._pending.clear()
        self._runner.reset()
        self._progress.busy_since = None

    def _decode(self, payload: bytes) -> ToWorker | None:
        try:
            return decode_to_worker(payload)
        except FrameError as error:
            self._wire.drop(str(error))
            return None

    def _say_goodbye(self, reason: str) -> None:
        standing = self._membership.standing(time.monotonic())
        if standing is not None:
            self._wire.send(Goodbye(reason=reason), *standing, timeout_s=SEND_TIMEOUT_S)
