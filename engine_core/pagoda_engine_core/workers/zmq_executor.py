"""Workers over ZMQ: every frame is checked by its envelope and accepted only from a worker's current life.

The engine loop thread polls. A worker connects twice per registration, so that beats never wait behind large messages:
data (`{incarnation}.{registration}/d`: Hello, plans, results, Goodbye) and control (`../c`: Beat, Drain). Peers choose
their routing ids themselves; only the epoch that we granted on a route is trusted.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.workers.executor import (
    MAX_REMEMBERED_LIVES,
    ExecutorEvent,
    LeaveCause,
    StepDone,
    ToExecutor,
    WorkerChanged,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerState,
)
from pagoda_engine_core.workers.liveness import TICK_S, Change, Liveness
from pagoda_engine_core.workers.registration import Registry
from pagoda_engine_core.workers.socket import WorkerSocket
from pagoda_proto.addresses import host_id
from pagoda_proto.channel import Envelope, FrameError, OtherVersionError, decode_from_worker, encode, open_envelope
from pagoda_proto.steps import (
    SPOKEN,
    Beat,
    BeatAck,
    Drain,
    Goodbye,
    Hello,
    Message,
    Refused,
    ResetWorker,
    StepFailed,
    StepPlan,
    StepResult,
    Versions,
    Welcome,
)

log = logging.getLogger(__name__)

MAX_FRAMES_PER_WAIT = 1000
MAX_NAMES_TOLD = 100
DATA, CONTROL = b"/d", b"/c"


class _DroppedError(Exception):
    """This frame is dropped; the argument is the reason under which it is counted."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One life of a worker. `steps` are the plans whose results it still owes, oldest first."""

    epoch: int
    hello: Hello
    version: int  # newest protocol version that both sides speak
    pidfd: int | None
    routes: dict[bytes, bytes]  # by kind
    sequences: dict[bytes, int]  # last one seen, by kind of route
    sequence: int = 0  # last one sent
    steps: deque[int] = field(default_factory=deque)
    steps_done: int = 0
    rss_bytes: int = 0


def _route(hello: Hello, kind: bytes) -> bytes:
    return f"{hello.incarnation}.{hello.registration}".encode() + kind


class ZmqExecutor:
    """Raises ValueError for an endpoint that others could reach, OSError if it is in use."""

    concurrent = True

    def __init__(
        self, config: EngineConfig, boot_id: str, clock: Callable[[], float] = time.monotonic, spoken: Versions = SPOKEN
    ) -> None:
        self._config = config
        self._spoken = spoken
        self._boot_id = boot_id
        self._clock = clock
        self._registry = Registry(config.max_model_len, spoken)
        self._liveness = Liveness(config, clock())
        self._host_id = host_id()
        self._peers: dict[int, _Peer] = {}
        self._ended_lives: deque[WorkerInfo] = deque(maxlen=MAX_REMEMBERED_LIVES)
        self._events: list[ExecutorEvent] = []
        self._counters: Counter[str] = Counter()
        self._refused_names: set[tuple[str, int]] = set()  # with their versions
        self._socket = WorkerSocket(config)
        self.endpoint = self._socket.endpoint
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket.socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    # --- Executor ----------------------------------------------------------------------------------------------------

    def send(self, epoch: int, message: ToExecutor, deadline_s: float = math.inf) -> None:
        if (peer := self._peers.get(epoch)) is None:
            return
        now = self._clock()
        match message:
            case StepPlan():
                self._liveness.owes(epoch, min(deadline_s, self._config.step_deadline_s), now)
                peer.steps.append(message.step)
                self._send_or_lose(peer, DATA, message)
            case Drain():
                self._liveness.drain(epoch, now)
                self._events.append(WorkerChanged(epoch, WorkerState.DRAINING))
                if not self._send(peer, CONTROL, message):
                    self._send_or_lose(peer, DATA, message)
            case ResetWorker():
                self._send_or_lose(peer, DATA, message)
                self._lose(epoch, LeaveCause.RESET, "reset by the engine core")

    def hold(self, numerics_id: str) -> str:
        return self._registry.hold(numerics_id)

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        if self._events:
            timeout_s = 0.0
        elif self._peers:
            timeout_s = min(timeout_s, TICK_S)
        ready = dict(self._poller.poll(int(timeout_s * 1000 + 0.999)))  # rounded up, so as not to wake early
        if ready.pop(self._wake_fd, 0):
            os.eventfd_read(self._wake_fd)
        self._counters["handshakes_refused"] += self._socket.refused_handshakes(self._clock())
        ended = [peer for peer in self._peers.values() if peer.pidfd in ready]
        if ready.pop(self._socket.socket, 0):
            self._receive_all()  # frames sent before a process ended still count
        for peer in ended:
            self._lose(peer.epoch, LeaveCause.DIED, f"process {peer.hello.pid} ended")
        for change in self._liveness.tick(self._clock()):
            self._changed(change)
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        try:
            os.eventfd_write(self._wake_fd, 1)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBADF):  # awake already, or closed
                raise

    def workers(self) -> Sequence[WorkerInfo]:
        alive = [
            WorkerInfo(peer.epoch, peer.hello, self._liveness.state(peer.epoch), peer.steps_done, peer.rss_bytes)
            for peer in self._peers.values()
        ]
        return [*alive, *self._ended_lives]

    def counters(self) -> Mapping[str, int]:
        return self._counters

    def close(self) -> None:
        for peer in self._peers.values():
            self._close_pidfd(peer)
        self._peers.clear()
        self._socket.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)

    # --- frames in ---------------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        now = self._clock()
        for _ in range(MAX_FRAMES_PER_WAIT):
            if (received := self._socket.receive()) is None:
                return
            route, parts = received
            try:
                self._receive(route, parts, now)
            except OtherVersionError as other:
                self._refuse_version(route, other)
            except _DroppedError as dropped:
                self._drop(str(dropped), route)
            except FrameError as error:
                self._drop("malformed", route, str(error))

    def _refuse_version(self, route: bytes, other: OtherVersionError) -> None:
        self._counters["frames_dropped_version"] += 1
        if not other.is_hello:
            return
        reason = f"protocol: version {self._spoken} is spoken here, this worker speaks {other.version}"
        name = (other.worker_id, other.version)
        if name not in self._refused_names and len(self._refused_names) < MAX_NAMES_TOLD:
            self._refused_names.add(name)
            log.warning("refused worker %r: %s", other.worker_id, reason)
        self._counters["workers_refused"] += 1
        envelope = Envelope(self._boot_id, other.worker_id, 0, 0, other.version)  # in its version, so it can read it
        self._send_frame(route, envelope, Refused(reason=reason, final=True))

    def _drop(self, reason: str, route: bytes, detail: str = "") -> None:
        name = f"frames_dropped_{reason}"
        self._counters[name] += 1
        if self._counters[name] == 1:  # only counted from then on; a flood of frames must not flood the log
            log.warning("dropped a frame from %r: %s %s (further ones are only counted)", route[:64], reason, detail)

    def _receive(self, route: bytes, parts: Sequence[bytes], now: float) -> None:
        envelope, payload = open_envelope(parts, self._spoken)
        if envelope.epoch == 0:
            self._receive_hello(route, envelope, payload, now)
            return
        peer, kind = self._judge(route, envelope)
        message = decode_from_worker(payload)
        peer.sequences[kind] = envelope.sequence
        match message:
            case StepResult() if kind == DATA:
                self._result(peer, message, now)
            case StepFailed() if kind == DATA:
                self._lose(peer.epoch, LeaveCause.STEP_FAILED, message.reason or "a step raised", message.step)
            case Beat() if kind == CONTROL:
                self._liveness.beat(peer.epoch, message.busy_s, now)
                peer.rss_bytes = message.rss_bytes
                if message.leaving and self._liveness.leaves(peer.epoch):
                    log.info("worker %r (epoch %d) is to leave", peer.hello.worker_id, peer.epoch)
                    self._events.append(WorkerChanged(peer.epoch, WorkerState.DRAINING))
                self._send(peer, CONTROL, BeatAck())
            case Goodbye():
                self._lose(peer.epoch, LeaveCause.LEFT, message.reason or "said goodbye")
            case _:
                raise _DroppedError("unexpected")

    def _judge(self, route: bytes, envelope: Envelope) -> tuple[_Peer, bytes]:
        """The peer that sent this frame, and on which of its routes. Raises _DroppedError if it is to be ignored."""
        if envelope.engine_boot_id != self._boot_id:
            self._tell_stranger(route, envelope)
            raise _DroppedError("boot_id")
        peer = self._peers.get(envelope.epoch)
        if peer is None:
            self._tell_stranger(route, envelope)
            raise _DroppedError("epoch")
        kind = route[-2:]
        if route != peer.routes.get(kind):
            raise _DroppedError("route")
        if envelope.worker_id != peer.hello.worker_id:
            raise _DroppedError("worker_id")
        if envelope.version != peer.version:
            raise _DroppedError("version")
        if envelope.sequence <= peer.sequences.get(kind, -1):
            raise _DroppedError("sequence")
        return peer, kind

    def _tell_stranger(self, route: bytes, envelope: Envelope) -> None:
        """Tell a life that we do not know (any more) to register again, without waiting for its lease to expire."""
        known = any(peer.routes[CONTROL] == route for peer in self._peers.values())
        if route.endswith(CONTROL) and not known:
            refused = Refused(reason="this life is over here; register anew")
            self._send_frame(route, Envelope(self._boot_id, envelope.worker_id, 0, 0, envelope.version), refused)

    def _result(self, peer: _Peer, result: StepResult, now: float) -> None:
        if not peer.steps or peer.steps[0] != result.step:
            expected = peer.steps[0] if peer.steps else None
            self._lose(peer.epoch, LeaveCause.MISANSWERED, f"answered step {result.step} when {expected} was due")
            raise _DroppedError("step")
        peer.steps.popleft()
        peer.steps_done += 1
        self._liveness.answered(peer.epoch, now)
        self._events.append(StepDone(peer.epoch, result))

    # --- lives -------------------------------------------------------------------------------------------------------

    def _receive_hello(self, route: bytes, envelope: Envelope, payload: bytes, now: float) -> None:
        hello = decode_from_worker(payload)
        if not isinstance(hello, Hello):
            raise _DroppedError("epoch")
        if route != _route(hello, DATA) or envelope.worker_id != hello.worker_id:
            raise _DroppedError("route")
        earlier = [peer for peer in self._peers.values() if peer.hello.incarnation == hello.incarnation]
        present = next((peer for peer in earlier if peer.hello.registration == hello.registration), None)
        if present is not None:
            self._greet_again(present, envelope.sequence)
            return
        if self._registry.is_stale(hello):
            raise _DroppedError("registration")
        refused = self._registry.refusal(hello, [p.hello for p in self._peers.values() if p not in earlier])
        if refused is not None:
            log.warning("refused worker %r: %s", hello.worker_id, refused.reason)
            self._counters["workers_refused"] += 1
            self._send_frame(route, Envelope(self._boot_id, hello.worker_id, 0, 0, envelope.version), refused)
            return
        for peer in earlier:  # it has started over, so its rows are gone
            self._lose(peer.epoch, LeaveCause.RENEWED, "registered again")
        self._admit(hello, envelope.sequence, now)

    def _greet_again(self, peer: _Peer, sequence: int) -> None:
        """Answer a Hello sent before our Welcome was read. Once there are plans, another Welcome would void them."""
        if sequence <= peer.sequences[DATA]:
            raise _DroppedError("sequence")
        peer.sequences[DATA] = sequence
        if not (peer.steps or peer.steps_done):
            self._welcome(peer)

    def _admit(self, hello: Hello, sequence: int, now: float) -> None:
        try:
            pidfd = self._watch_process(hello)
        except ProcessLookupError:
            raise _DroppedError("process_gone") from None
        version = self._spoken.agreed(hello.spoken) or hello.protocol
        routes = {kind: _route(hello, kind) for kind in (DATA, CONTROL)}
        peer = _Peer(self._registry.grant(hello), hello, version, pidfd, routes, {DATA: sequence})
        self._peers[peer.epoch] = peer
        self._liveness.join(peer.epoch, now)
        self._events.append(WorkerJoined(peer.epoch, hello))
        log.info("worker %r joined as epoch %d (%s)", hello.worker_id, peer.epoch, hello.device)
        self._welcome(peer)

    def _welcome(self, peer: _Peer) -> None:
        welcome = Welcome(epoch=peer.epoch, engine_boot_id=self._boot_id, lease_s=self._config.worker_lease_s)
        self._send_or_lose(peer, DATA, welcome)

    def _watch_process(self, hello: Hello) -> int | None:
        """A descriptor that becomes readable when the worker's process ends, if it runs on this host.

        Raises ProcessLookupError if it has already ended.
        """
        if not self._host_id or hello.host_id != self._host_id or hello.pid < 1:
            return None
        try:
            pidfd = os.pidfd_open(hello.pid)
        except ProcessLookupError:
            raise
        except OSError as error:  # not permitted, or no descriptors left: beats remain
            log.warning("cannot watch process %d of worker %r: %s", hello.pid, hello.worker_id, error)
            return None
        self._poller.register(pidfd, select.POLLIN)
        return pidfd

    def _changed(self, change: Change) -> None:
        if change.cause is not None:
            self._lose(change.epoch, change.cause, change.reason)
        else:
            log.info("worker of epoch %d is %s: %s", change.epoch, change.state, change.reason)
            self._events.append(WorkerChanged(change.epoch, change.state))

    def _lose(self, epoch: int, cause: LeaveCause, reason: str, step: int = 0) -> None:
        """End a life. From here on its epoch is unknown, so frames that still arrive under it have no effect."""
        peer = self._peers.pop(epoch, None)
        if peer is None:
            return
        self._close_pidfd(peer)
        self._liveness.forget(epoch)
        self._ended_lives.appendleft(WorkerInfo(epoch, peer.hello, cause.end_state, peer.steps_done))
        died = cause.end_state is not WorkerState.GONE
        self._counters["worker_deaths"] += died
        level = logging.WARNING if died else logging.INFO
        log.log(level, "worker %r (epoch %d) %s: %s", peer.hello.worker_id, epoch, cause, reason)
        self._events.append(WorkerLeft(epoch, cause, reason, step))

    def _close_pidfd(self, peer: _Peer) -> None:
        if peer.pidfd is not None:
            self._poller.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None

    # --- frames out --------------------------------------------------------------------------------------------------

    def _send_or_lose(self, peer: _Peer, kind: bytes, message: Message) -> None:
        if not self._send(peer, kind, message):
            self._lose(peer.epoch, LeaveCause.UNREACHABLE, "cannot be reached")

    def _send(self, peer: _Peer, kind: bytes, message: Message) -> bool:
        peer.sequence += 1
        envelope = Envelope(self._boot_id, peer.hello.worker_id, peer.epoch, peer.sequence, peer.version)
        return self._send_frame(peer.routes[kind], envelope, message)

    def _send_frame(self, route: bytes, envelope: Envelope, message: Message) -> bool:
        sent = self._socket.send(route, encode(envelope, message))
        self._counters["frames_unsent"] += not sent
        return sent
