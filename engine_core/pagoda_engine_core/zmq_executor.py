"""Workers over ZMQ: every frame is judged by its envelope, and only the present life of a worker is listened to.

One ROUTER socket, bound here and polled by the engine loop's thread. A worker connects twice, so that beats never wait
behind tensors: data (`{incarnation}/d`: Hello, plans, results, Goodbye) and control (`{incarnation}/c`: Beat, Drain).
Routing ids are the peers' own claim; what is believed is the epoch that we granted on that route.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pagoda_engine_core import endpoints
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.executor import (
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
from pagoda_engine_core.handshakes import RefusedHandshakes
from pagoda_engine_core.liveness import TICK_S, Limits, Liveness
from pagoda_engine_core.registration import Registry
from pagoda_proto.channel import MAX_FRAME_BYTES, Envelope, FrameError, decode_from_worker, encode, open_envelope
from pagoda_proto.host import host_id
from pagoda_proto.keys import CurveKeys, load_curve
from pagoda_proto.steps import (
    Beat,
    BeatAck,
    Drain,
    Goodbye,
    Hello,
    Message,
    Refused,
    ResetWorker,
    StepPlan,
    StepResult,
    Welcome,
)

log = logging.getLogger(__name__)

SOCKET_OPTIONS = {
    zmq.ROUTER_MANDATORY: 1,  # sending to a peer that is gone fails instead of vanishing
    zmq.ROUTER_HANDOVER: 0,  # a second peer with a known routing id never takes the first one's place
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.LINGER: 0,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 3000,
    zmq.HEARTBEAT_TTL: 3000,
    zmq.HANDSHAKE_IVL: 3000,
}
WORKER_KEYS = "worker*.public"
MAX_FRAMES_PER_WAIT = 1000
DATA, CONTROL = b"/d", b"/c"
_CAUSES = {WorkerState.DEAD: LeaveCause.DIED, WorkerState.HUNG: LeaveCause.HUNG}
_END_STATES = {LeaveCause.DIED: WorkerState.DEAD, LeaveCause.HUNG: WorkerState.HUNG, LeaveCause.LEFT: WorkerState.GONE}


class _DroppedError(Exception):
    """This frame is not acted upon; the argument is the reason it is counted under."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A worker in one of its lives. `steps` are the plans it still owes a result for, oldest first."""

    epoch: int
    hello: Hello
    pidfd: int | None
    sequences: dict[bytes, int]  # last one seen, by the kind of route
    sequence: int = 0  # last one sent
    steps: deque[int] = field(default_factory=deque)
    steps_done: int = 0

    def route(self, kind: bytes) -> bytes:
        return self.hello.incarnation.encode() + kind


class _AllowedKeys:
    """ZAP's question (RFC 27), asked by libzmq before a peer's first frame reaches us."""

    def __init__(self, keys: CurveKeys) -> None:
        self._allowed = frozenset(keys.peers)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed


def admit_only(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: CurveKeys
) -> ThreadAuthenticator:
    """Let only holders of `keys.peers` connect to `socket`, encrypted; to be called before it is bound."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_AllowedKeys(keys))
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    return authenticator


class ZmqExecutor:
    """Raises ValueError for an endpoint that others could reach, OSError when it is in use."""

    def __init__(self, config: EngineConfig, boot_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._boot_id = boot_id
        self._clock = clock
        self._registry = Registry(config.max_model_len)
        limits = Limits(config.worker_suspect_s, config.worker_dead_s, config.step_deadline_s)
        self._liveness = Liveness(limits, clock())
        self._host_id = host_id()
        self._peers: dict[int, _Peer] = {}
        self._ended: deque[WorkerInfo] = deque(maxlen=MAX_REMEMBERED_LIVES)
        self._events: list[ExecutorEvent] = []
        self._counters: Counter[str] = Counter()
        keyed = bool(config.keys_dir) and config.worker_endpoint.startswith("tcp://")
        keys = load_curve(config.keys_dir, WORKER_KEYS) if keyed else None
        self._path = endpoints.prepare(config.worker_endpoint, file_scheme="ipc://", tcp_scheme="tcp://", keyed=keyed)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._authenticator = admit_only(self._context, self._socket, keys) if keys else None
        for option, value in SOCKET_OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._bind(config.worker_endpoint)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._refused = RefusedHandshakes(self._socket)

    def _bind(self, endpoint: str) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"cannot listen for workers at {endpoint}: {error}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # --- Executor ----------------------------------------------------------------------------------------------------

    def send(self, epoch: int, message: ToExecutor) -> None:
        peer = self._peers.get(epoch)
        if peer is None:
            return
        now = self._clock()
        match message:
            case StepPlan():
                peer.steps.append(message.step)
                self._liveness.owes(epoch, now)
                self._send_or_lose(peer, DATA, message)
            case Drain():
                self._liveness.drain(epoch, now)
                self._events.append(WorkerChanged(epoch, WorkerState.DRAINING))
                if not self._send(peer, CONTROL, message):
                    self._send_or_lose(peer, DATA, message)
            case ResetWorker():
                self._send_or_lose(peer, DATA, message)
                self._lose(epoch, LeaveCause.LEFT, "reset by the engine core")

    def wait(self, timeout_s: float) -> list[ExecutorEvent]:
        if self._events:
            timeout_s = 0.0
        elif self._peers:
            timeout_s = min(timeout_s, TICK_S)
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if ready.pop(self._wake_fd, 0):
            os.eventfd_read(self._wake_fd)
        self._counters["handshakes_refused"] += self._refused.take()
        ended = [peer for peer in self._peers.values() if peer.pidfd in ready]
        if ready.pop(self._socket, 0):
            self._receive_all()  # what a process said before it ended still counts
        for peer in ended:
            self._lose(peer.epoch, LeaveCause.DIED, f"process {peer.hello.pid} ended")
        for change in self._liveness.tick(self._clock()):
            self._changed(change.epoch, change.state, change.reason)
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
            WorkerInfo(peer.epoch, peer.hello, self._liveness.state(peer.epoch), peer.steps_done)
            for peer in self._peers.values()
        ]
        return [*alive, *self._ended]

    def counters(self) -> Mapping[str, int]:
        return self._counters

    def close(self) -> None:
        for peer in self._peers.values():
            self._close_pidfd(peer)
        self._peers.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)

    # --- frames in ---------------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        now = self._clock()
        for _ in range(MAX_FRAMES_PER_WAIT):
            try:
                route, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(route, parts, now)
            except _DroppedError as dropped:
                self._drop(str(dropped), route)
            except FrameError as error:
                self._drop("malformed", route, str(error))

    def _drop(self, reason: str, route: bytes, detail: str = "") -> None:
        name = f"frames_dropped_{reason}"
        self._counters[name] += 1
        if self._counters[name] == 1:  # the counter tells the rest; a flood must not become a flood of lines
            log.warning("dropped a frame from %r: %s %s (further ones are only counted)", route[:64], reason, detail)

    def _receive(self, route: bytes, parts: Sequence[bytes], now: float) -> None:
        envelope, payload = open_envelope(parts)
        if envelope.epoch == 0:
            self._receive_hello(route, envelope, payload, now)
            return
        peer, kind = self._judge(route, envelope)
        message = decode_from_worker(payload)
        peer.sequences[kind] = envelope.sequence
        match message:
            case StepResult() if kind == DATA:
                self._result(peer, message, now)
            case Beat() if kind == CONTROL:
                self._liveness.beat(peer.epoch, message.busy_s, now)
                self._send(peer, CONTROL, BeatAck())
            case Goodbye():
                self._lose(peer.epoch, LeaveCause.LEFT, message.reason or "said goodbye")
            case _:
                raise _DroppedError("unexpected")

    def _judge(self, route: bytes, envelope: Envelope) -> tuple[_Peer, bytes]:
        """Whose frame this is and on which of its routes, or why it is not listened to."""
        if envelope.engine_boot_id != self._boot_id:
            self._tell_stranger(route, envelope)
            raise _DroppedError("boot_id")
        peer = self._peers.get(envelope.epoch)
        if peer is None:
            self._tell_stranger(route, envelope)
            raise _DroppedError("epoch")
        kind = route[-2:]
        if kind not in (DATA, CONTROL) or route != peer.route(kind):
            raise _DroppedError("route")
        if envelope.worker_id != peer.hello.worker_id:
            raise _DroppedError("worker_id")
        if envelope.sequence <= peer.sequences.get(kind, -1):
            raise _DroppedError("sequence")
        return peer, kind

    def _tell_stranger(self, route: bytes, envelope: Envelope) -> None:
        """A life that we do not know (any more) need not wait for its lease to run out before it registers."""
        known = any(peer.route(CONTROL) == route for peer in self._peers.values())
        if route.endswith(CONTROL) and not known:
            refused = Refused(reason="this life is over here; register anew")
            self._send_frame(route, Envelope(self._boot_id, envelope.worker_id, 0, 0), refused)

    def _result(self, peer: _Peer, result: StepResult, now: float) -> None:
        if not peer.steps or peer.steps[0] != result.step:
            expected = peer.steps[0] if peer.steps else None
            self._lose(peer.epoch, LeaveCause.DIED, f"answered step {result.step} when {expected} was due")
            raise _DroppedError("step")
        peer.steps.popleft()
        peer.steps_done += 1
        self._liveness.answered(peer.epoch, len(peer.steps), now)
        self._events.append(StepDone(peer.epoch, result))

    # --- lives -------------------------------------------------------------------------------------------------------

    def _receive_hello(self, route: bytes, envelope: Envelope, payload: bytes, now: float) -> None:
        hello = decode_from_worker(payload)
        if not isinstance(hello, Hello):
            raise _DroppedError("epoch")
        if route != hello.incarnation.encode() + DATA or envelope.worker_id != hello.worker_id:
            raise _DroppedError("route")
        earlier = [peer for peer in self._peers.values() if peer.hello.incarnation == hello.incarnation]
        refused = self._registry.refusal(hello, [p.hello for p in self._peers.values() if p not in earlier])
        if refused is not None:
            log.warning("refused worker %r: %s", hello.worker_id, refused.reason)
            self._counters["workers_refused"] += 1
            self._send_frame(route, Envelope(self._boot_id, hello.worker_id, 0, 0), refused)
            return
        for peer in earlier:  # it has begun anew, so whatever it held is gone
            self._lose(peer.epoch, LeaveCause.LEFT, "registered again")
        self._admit(hello, envelope.sequence, now)

    def _admit(self, hello: Hello, sequence: int, now: float) -> None:
        try:
            pidfd = self._watch_process(hello)
        except ProcessLookupError:
            raise _DroppedError("process_gone") from None
        peer = _Peer(self._registry.grant(hello), hello, pidfd, {DATA: sequence})
        self._peers[peer.epoch] = peer
        self._liveness.join(peer.epoch, now)
        self._events.append(WorkerJoined(peer.epoch, hello))
        log.info("worker %r joined as epoch %d (%s)", hello.worker_id, peer.epoch, hello.device)
        welcome = Welcome(epoch=peer.epoch, engine_boot_id=self._boot_id, lease_s=self._config.worker_lease_s)
        self._send_or_lose(peer, DATA, welcome)

    def _watch_process(self, hello: Hello) -> int | None:
        """A descriptor that becomes readable when the worker's process ends, if it runs on this host.

        Raises ProcessLookupError when it has ended already.
        """
        if not self._host_id or hello.host_id != self._host_id or hello.pid < 1:
            return None
        try:
            pidfd = os.pidfd_open(hello.pid)
        except ProcessLookupError:
            raise
        except OSError as error:  # not permitted, or no descriptors left: the beats still tell
            log.warning("cannot watch process %d of worker %r: %s", hello.pid, hello.worker_id, error)
            return None
        self._poller.register(pidfd, select.POLLIN)
        return pidfd

    def _changed(self, epoch: int, state: WorkerState, reason: str) -> None:
        if state in _CAUSES:
            self._lose(epoch, _CAUSES[state], reason)
        else:
            log.info("worker of epoch %d is %s: %s", epoch, state, reason)
            self._events.append(WorkerChanged(epoch, state))

    def _lose(self, epoch: int, cause: LeaveCause, reason: str) -> None:
        """End a life. From here on the epoch is unknown, so nothing that still arrives under it has any effect."""
        peer = self._peers.pop(epoch, None)
        if peer is None:
            return
        self._close_pidfd(peer)
        self._liveness.forget(epoch)
        self._ended.appendleft(WorkerInfo(epoch, peer.hello, _END_STATES[cause], peer.steps_done))
        if cause is not LeaveCause.LEFT:
            self._counters["worker_deaths"] += 1
        level = logging.INFO if cause is LeaveCause.LEFT else logging.WARNING
        log.log(level, "worker %r (epoch %d) %s: %s", peer.hello.worker_id, epoch, cause, reason)
        self._events.append(WorkerLeft(epoch, cause, reason))

    def _close_pidfd(self, peer: _Peer) -> None:
        if peer.pidfd is not None:
            self._poller.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None

    # --- frames out --------------------------------------------------------------------------------------------------

    def _send_or_lose(self, peer: _Peer, kind: bytes, message: Message) -> None:
        if not self._send(peer, kind, message):
            self._lose(peer.epoch, LeaveCause.DIED, "cannot be reached")

    def _send(self, peer: _Peer, kind: bytes, message: Message) -> bool:
        peer.sequence += 1
        envelope = Envelope(self._boot_id, peer.hello.worker_id, peer.epoch, peer.sequence)
        return self._send_frame(peer.route(kind), envelope, message)

    def _send_frame(self, route: bytes, envelope: Envelope, message: Message) -> bool:
        """False when nobody is there, or when a peer has not read for so long that its queue is full."""
        try:
            self._socket.send_multipart([route, *encode(envelope, message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._counters["frames_unsent"] += 1
            return False
        return True
