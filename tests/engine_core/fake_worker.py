"""Workers without tensors that speak the real wire protocol.

Peer         only the two DEALER sockets of one registration; tests send every message themselves
FakeWorker   a whole worker on a thread: registers, beats, executes plans with FakeRunner, registers anew
processes    `python -m tests.engine_core.fake_worker ENDPOINT WORKER_ID [STEP_S]` runs one as a process
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from tests.fakes import FakeRunner

from pagoda_proto.addresses import host_id
from pagoda_proto.channel import Envelope, decode_to_worker, encode, open_envelope
from pagoda_proto.steps import (
    PROTOCOL_VERSION,
    SPOKEN,
    Beat,
    BeatAck,
    Drain,
    Goodbye,
    Hello,
    KVGroup,
    Message,
    Refused,
    ResetWorker,
    StepPlan,
    ToWorker,
    Welcome,
)

BEAT_S = 0.1
RSS_BYTES = 123_456_000  # as a FakeWorker reports
REPO = Path(__file__).parents[2]


def make_hello(worker_id: str = "w0", **fields: object) -> Hello:
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        worker_id=worker_id,
        incarnation=secrets.token_hex(8),
        registration=1,
        model_fingerprint="fake",
        numerics_id="fake-numerics",
        vocab_size=256,
        max_model_len=1024,
        block_size=4,
        device="fake",
        host_id="",
        pid=os.getpid(),
        kv_groups=(KVGroup(64),),
    )
    one = {name: fields.pop(name) for name in KVGroup.__struct_fields__ if name in fields}  # fields of the only group
    if one:
        fields["kv_groups"] = (KVGroup(**{"num_blocks": 64} | one),) if one.get("num_blocks", 64) else ()
    return msgspec.structs.replace(hello, **fields)


class Peer:
    """One worker's sockets. Used by one thread at a time. `version` is the protocol version that it sends."""

    def __init__(self, endpoint: str, hello: Hello, *, with_control: bool = True) -> None:
        self.hello = hello
        self.boot_id, self.epoch = "", 0
        self.spoken, self.version = SPOKEN, PROTOCOL_VERSION
        self._sequence = 0
        self._endpoint = endpoint
        self._with_control = with_control
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._connect()

    def _connect(self) -> None:
        self.data = self._socket(b"/d")
        self.control = self._socket(b"/c") if self._with_control else self.data

    def _socket(self, kind: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        route = f"{self.hello.incarnation}.{self.hello.registration}".encode() + kind
        socket.setsockopt(zmq.ROUTING_ID, route)
        socket.setsockopt(zmq.LINGER, 200)
        socket.connect(self._endpoint)
        self._sockets.append(socket)
        return socket

    def renew(self) -> None:
        """Open sockets with the routing ids of the next registration; the old ones stay open, as if unnoticed."""
        self.hello = msgspec.structs.replace(self.hello, registration=self.hello.registration + 1)
        self._connect()

    def frame(self, message: Message, **changes: object) -> list[bytes]:
        self._sequence += 1
        envelope = Envelope(self.boot_id, self.hello.worker_id, self.epoch, self._sequence, self.version)
        return encode(envelope._replace(**changes), message)  # type: ignore[arg-type]

    def send(self, message: Message, socket: zmq.Socket[bytes] | None = None, **changes: object) -> None:
        (socket or self.data).send_multipart(self.frame(message, **changes))

    def beat(self, busy_s: float = 0.0, rss_bytes: int = 0) -> None:
        self.send(Beat(busy_s=busy_s, rss_bytes=rss_bytes), self.control)

    def receive(self, socket: zmq.Socket[bytes] | None = None, timeout_s: float = 10.0) -> tuple[Envelope, ToWorker]:
        socket = socket or self.data
        if not socket.poll(round(timeout_s * 1000)):
            raise TimeoutError("the engine core says nothing")
        envelope, payload = open_envelope(socket.recv_multipart(), self.spoken)
        return envelope, decode_to_worker(payload)

    def say_hello(self) -> None:
        self.boot_id, self.epoch = "", 0
        self.send(self.hello)

    def register(self) -> Welcome:
        self.say_hello()
        _, message = self.receive()
        if not isinstance(message, Welcome):
            raise AssertionError(f"not welcome: {message}")
        self.boot_id, self.epoch = message.engine_boot_id, message.epoch
        return message

    def close(self) -> None:
        self._context.destroy(linger=200)


def runner_of(hello: Hello) -> FakeRunner:
    return FakeRunner(block_size=hello.block_size, kv_groups=hello.kv_groups)


class FakeWorker:
    """`step_s` is how long a step takes. While `hold` is set, plans pile up."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello | None = None,
        *,
        step_s: float = 0.0,
        runner: Callable[[Hello], FakeRunner] | None = None,
    ) -> None:
        self.hello = hello or make_hello()
        self.hold = threading.Event()
        self.refused: Refused | None = None
        self.registered = threading.Event()
        self.plans: list[StepPlan] = []
        self.most_waiting = 0
        self.steps_done = 0
        self._endpoint = endpoint
        self._step_s = step_s
        self._make_runner = runner or runner_of
        self._waiting: list[StepPlan] = []
        self._stop = threading.Event()
        self._drained = False
        self._thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> FakeWorker:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Vanish without a word, as a killed process would."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(10)

    def __enter__(self) -> FakeWorker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> None:
        peer = Peer(self._endpoint, self.hello)
        try:
            while not self._stop.is_set() and not self._drained and self._register(peer):
                self._serve(peer)
                peer.renew()
        finally:
            peer.close()

    def _register(self, peer: Peer) -> bool:
        peer.say_hello()
        while not self._stop.is_set():
            try:
                _, message = peer.receive(timeout_s=0.1)
            except TimeoutError:
                continue
            if isinstance(message, Refused):
                self.refused = message
                self.registered.set()
                return False
            if isinstance(message, Welcome):
                peer.boot_id, peer.epoch = message.engine_boot_id, message.epoch
                self._lease_s = message.lease_s
                self._runner = self._make_runner(self.hello)
                self._waiting.clear()
                self.registered.set()
                return True
        return False

    def _serve(self, peer: Peer) -> None:
        poller = zmq.Poller()
        poller.register(peer.data, zmq.POLLIN)
        poller.register(peer.control, zmq.POLLIN)
        heard_at = time.monotonic()
        beat_at = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if now - heard_at > self._lease_s:
                return
            if now - beat_at >= BEAT_S:
                beat_at = now
                peer.beat(rss_bytes=RSS_BYTES)
            ready = dict(poller.poll(0 if self._waiting and not self.hold.is_set() else 20))
            for socket in ready:
                heard_at = time.monotonic()
                envelope, message = peer.receive(socket)
                if isinstance(message, Refused) or (envelope.epoch == peer.epoch and not self._take(peer, message)):
                    return
            if self._waiting and not self.hold.is_set() and peer.data not in ready:
                self._execute(peer)

    def _take(self, peer: Peer, message: ToWorker) -> bool:
        match message:
            case StepPlan():
                self._waiting.append(message)
                self.plans.append(message)
                self.most_waiting = max(self.most_waiting, len(self._waiting))
            case Drain():
                peer.send(Goodbye(reason="drained"))
                self._drained = True
                return False
            case ResetWorker():
                return False
            case BeatAck():
                pass
        return True

    def _execute(self, peer: Peer) -> None:
        plan = self._waiting.pop(0)
        if self._step_s:
            time.sleep(self._step_s)
        result = self._runner.execute(plan)
        self.steps_done += 1
        peer.send(result)


def start_process(endpoint: str, worker_id: str, step_s: float = 0.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.engine_core.fake_worker", endpoint, worker_id, str(step_s)]
    return subprocess.Popen(command, cwd=REPO)


def main(endpoint: str, worker_id: str, step_s: str = "0") -> None:
    FakeWorker(endpoint, make_hello(worker_id, host_id=host_id()), step_s=float(step_s)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
