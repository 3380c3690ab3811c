"""An engine core that follows the protocol exactly as told, and a worker's loop in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from queue import SimpleQueue
from typing import Any

import zmq
from tests.worker.fakes_model import FakeModel, fake_runner, new_row

from pagoda_proto.channel import Envelope, decode_from_worker, encode, open_envelope
from pagoda_proto.steps import (
    PROTOCOL_VERSION,
    Beat,
    BeatAck,
    Chunk,
    Hello,
    Message,
    StepPlan,
    StepResult,
    Versions,
    Welcome,
)
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.process.loop import run, serve

WAIT_S = 120.0


class FakeEngine:
    """A ROUTER that follows the protocol exactly as told, in one version. It answers beats only on demand."""

    def __init__(self, endpoint: str, boot_id: str = "boot-1") -> None:
        self.boot_id = boot_id
        self.version = PROTOCOL_VERSION
        self.epoch = 0
        self.hello: Hello | None = None
        self.hellos = 0
        self.beats: list[tuple[Envelope, Beat]] = []
        self.answer_beats = True
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self._context.destroy(linger=0)

    @property
    def route(self) -> str:
        """The route of the last registration, without the kind of connection."""
        assert self.hello is not None
        return f"{self.hello.incarnation}.{self.hello.registration}"

    def send(self, message: Message, *, kind: str = "/d", epoch: int | None = None, boot_id: str | None = None) -> None:
        assert self.hello is not None
        envelope = Envelope(
            self.boot_id if boot_id is None else boot_id,
            self.hello.worker_id,
            self.epoch if epoch is None else epoch,
            1,
            self.version,
        )
        self.send_parts(encode(envelope, message), kind)

    def send_parts(self, parts: list[bytes], kind: str = "/d") -> None:
        route = (self.route + kind).encode()
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self.socket.send_multipart([route, *parts])
                return
            except zmq.ZMQError as error:  # one of the two routes may not exist yet
                if error.errno != zmq.EHOSTUNREACH or time.monotonic() > deadline:
                    raise
                self.socket.poll(10, zmq.POLLERR)

    def receive(self, timeout_s: float = WAIT_S) -> tuple[bytes, Envelope, Any] | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        route, *parts = self.socket.recv_multipart()
        envelope, payload = open_envelope(parts, Versions(self.version, self.version))
        message = decode_from_worker(payload)
        if isinstance(message, Hello):
            self.hello, self.hellos = message, self.hellos + 1
            assert route.decode() == f"{self.route}/d"
            assert (envelope.engine_boot_id, envelope.epoch) == ("", 0)
        return route, envelope, message

    def until(self, kind: type, timeout_s: float = WAIT_S) -> tuple[Envelope, Any]:
        """Return the next message of this kind; answer the beats before it."""
        while True:
            received = self.receive(timeout_s)
            assert received is not None, f"no {kind.__name__} came"
            route, envelope, message = received
            if isinstance(message, Beat):
                self.beats.append((envelope, message))
                assert route.endswith(b"/c")
                if self.answer_beats and envelope.epoch == self.epoch and route.decode() == f"{self.route}/c":
                    self._acknowledge(route)
            if isinstance(message, kind):
                return envelope, message

    def _acknowledge(self, route: bytes) -> None:
        assert self.hello is not None
        envelope = Envelope(self.boot_id, self.hello.worker_id, self.epoch, 1, self.version)
        with contextlib.suppress(zmq.ZMQError):  # the worker may have registered again meanwhile
            self.socket.send_multipart([route, *encode(envelope, BeatAck())])

    def admit(self, lease_s: float = 60.0) -> None:
        """Wait for a Hello and welcome the worker under the next epoch."""
        self.until(Hello)
        self.welcome(lease_s)

    def welcome(self, lease_s: float = 60.0) -> None:
        self.epoch += 1
        self.send(Welcome(epoch=self.epoch, engine_boot_id=self.boot_id, lease_s=lease_s))

    def result(self) -> StepResult:
        envelope, result = self.until(StepResult)
        assert (envelope.engine_boot_id, envelope.epoch) == (self.boot_id, self.epoch)
        assert isinstance(result, StepResult)
        return result


class Worker:
    """The loop in a thread, as the process would run it; with a fake model unless the configuration names one."""

    def __init__(
        self, config: WorkerConfig, model: FakeModel | None = None, accelerator: Accelerator | None = None
    ) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.events: SimpleQueue[dict[str, object]] = SimpleQueue()
        self.config = config
        self.model = model or FakeModel()
        self.runner = fake_runner(self.model, accelerator)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            if self.config.model:
                run(self.config, self.events.put, self.stop)
            else:
                serve(self.runner, self.config, self.events.put, self.stop)
        except Exception as error:  # noqa: BLE001 - judged by the test
            self.error = error

    def event(self, name: str) -> dict[str, object]:
        while True:
            event = self.events.get(timeout=WAIT_S)
            if event["event"] == name:
                return event

    def end(self) -> None:
        self.stop.set()
        if self.model.gate is not None:
            self.model.gate.set()
        self.join()

    def join(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def first_plan(step: int = 1, row_id: int = 1) -> StepPlan:
    return StepPlan(step=step, new_rows=[new_row(row_id, [5, 6, 7], [row_id])], chunks=[Chunk(row_id, 0, 3, True)])


def next_plan(step: int, row_id: int = 1, start: int | None = None) -> StepPlan:
    return StepPlan(step=step, chunks=[Chunk(row_id, start if start is not None else step + 1, 1, True)])
