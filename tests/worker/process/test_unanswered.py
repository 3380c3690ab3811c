"""A worker that gets no answer logs this and why: once, and then less and less often."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
import zmq
from tests.worker.fakes_loop import WAIT_S, Worker
from tests.worker.fakes_model import FakeModel, fake_runner
from zmq.auth.thread import ThreadAuthenticator

from pagoda.tools.keygen import generate
from pagoda_proto.keys import CurveKeys, load_curve
from pagoda_proto.steps import Hello
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process import loop
from pagoda_worker.process.control import Progress
from pagoda_worker.process.departure import Departure
from pagoda_worker.process.loop import Identity, StepLoop
from pagoda_worker.process.wire import NO_CONNECTION, NO_HANDSHAKE, Link, Wire


@pytest.fixture
def lines() -> Iterator[queue.Queue[str]]:
    """The loop's warnings, from any thread."""
    told: queue.Queue[str] = queue.Queue()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.put(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(loop.__name__).addHandler(handler)
    yield told
    logging.getLogger(loop.__name__).removeHandler(handler)


class Unanswered:
    """Registrations that are never answered; after the last one the worker is told to leave."""

    why_unanswered = "tcp://there:1: no connection"

    def __init__(self, attempts: int, stop: threading.Event) -> None:
        self.attempts = attempts
        self._stop = stop

    def __call__(self, hello: Hello) -> Unanswered:
        return self

    def __enter__(self) -> Unanswered:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def ask(self, answer_s: float, leaving: object) -> None:
        self.attempts -= 1
        if not self.attempts:
            self._stop.set()


def test_of_attempts_in_a_row_without_an_answer_ever_fewer_are_told(lines: queue.Queue[str]) -> None:
    stop = threading.Event()
    departure = Departure(stop, 0.0)
    runner, identity = fake_runner(FakeModel()), Identity.of_this_process("w")
    StepLoop(runner, identity, Unanswered(1000, stop), Progress(), departure).run(lambda event: None, stop)  # type: ignore[arg-type]
    told = [lines.get_nowait() for _ in range(lines.qsize())]
    assert set(told) == {"no engine core answers at tcp://there:1: no connection; retrying"}
    assert len(told) == 11  # 1, 2, 4 .. 512, and 768


def test_a_worker_without_an_engine_core_tells_where_it_asks(lines: queue.Queue[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    worker = Worker(WorkerConfig(engine=endpoint, worker_id="w-1", drain_timeout_s=0.0))
    try:
        assert lines.get(timeout=WAIT_S) == f"no engine core answers at {endpoint}: {NO_CONNECTION}; retrying"
    finally:
        worker.end()


@pytest.fixture
def keys(tmp_path: Path) -> tuple[CurveKeys, CurveKeys]:
    """The keys of a worker, and of a worker from another deployment."""
    generate(tmp_path / "ours")
    generate(tmp_path / "theirs")
    ours, theirs = (load_curve(str(tmp_path / whose / "worker"), "engine-core.public") for whose in ("ours", "theirs"))
    return ours, theirs


@pytest.fixture
def keyed(keys: tuple[CurveKeys, CurveKeys], tmp_path: Path) -> Iterator[str]:
    """The address of a ROUTER that admits our worker's key."""
    engine = load_curve(str(tmp_path / "ours" / "engine-core"), "worker*.public")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve_callback(domain="*", credentials_provider=Admits(engine.peers))
        router.linger = 0
        router.curve_server, router.curve_secretkey = True, engine.secret
        yield f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        guard.stop()


class Admits:
    def __init__(self, peers: tuple[bytes, ...]) -> None:
        self._peers = peers

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._peers


def test_why_nothing_is_heard_is_told_by_what_libzmq_saw(keys: tuple[CurveKeys, CurveKeys], keyed: str) -> None:
    ours, theirs = keys
    causes = {
        Link(keyed, "w", ours): "connected, but there is no answer",
        Link(keyed, "w", theirs._replace(peers=ours.peers)): "the engine core does not admit this worker's key",
        Link(keyed, "w", ours._replace(peers=theirs.peers)): NO_HANDSHAKE,
        Link(keyed, "w"): NO_HANDSHAKE,
        Link("ipc:///no/such/socket", "w"): NO_CONNECTION,
    }
    with zmq.Context() as context:
        for number, (link, cause) in enumerate(causes.items()):
            wire, deadline = Wire(context, link, str(number)), time.monotonic() + WAIT_S
            while cause not in wire.why_silent() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert cause in wire.why_silent()
            wire.close()
