from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine_core.fake_worker import FakeWorker, make_hello, start_process
from tests.engine_core.fakes_sink import RecordingSink
from tests.fakes import make_record, reference_tokens

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.workers.zmq_executor import ZmqExecutor
from pagoda_proto.records import FinishReason, RequestRecord


class Live:
    """An engine core with its loop thread and a ZMQ executor."""

    def __init__(self, directory: Path, **config: object) -> None:
        config = {
            "worker_endpoint": f"ipc://{directory}/w.sock",
            "worker_suspect_s": 0.5,
            "worker_dead_s": 1.0,
        } | config
        executor = ZmqExecutor(EngineConfig(**config), "boot")
        self.engine = EngineCore(EngineConfig(**config), executor)
        self.endpoint = executor.endpoint
        self.sink = RecordingSink()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.engine.run, args=(self._stop,))
        self._thread.start()

    def submit_all(self, records: list[RequestRecord]) -> None:
        for record in records:
            self.engine.submit(record, self.sink)

    def ask(self, question: Callable[[], object]) -> object:
        return self.engine.call(question).result(10)

    def close(self) -> None:
        self._stop.set()
        self.engine.call(lambda: None)
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def live(socket_dir: Path) -> Iterator[Live]:
    live = Live(socket_dir)
    yield live
    live.close()


def records(count: int, max_tokens: int = 40) -> list[RequestRecord]:
    return [make_record(range(1 + i % 7), max_tokens=max_tokens, seed=i) for i in range(count)]


def check(live: Live, submitted: list[RequestRecord]) -> None:
    live.sink.wait_endings(len(submitted))
    for record in submitted:
        assert live.sink.choices(record.request_id) == reference_tokens(record)
        assert live.sink.endings[record.request_id].finish_reason is FinishReason.LENGTH


def test_two_steps_really_are_in_flight_over_the_wire(live: Live) -> None:
    worker = FakeWorker(live.endpoint)
    worker.hold.set()
    with worker:
        submitted = records(1)
        live.submit_all(submitted)
        while worker.most_waiting < 2:
            worker.registered.wait(0.01)
        worker.hold.clear()
        check(live, submitted)
    assert worker.most_waiting == 2


def test_workers_that_join_late_share_the_load(live: Live) -> None:
    submitted = records(24, max_tokens=30)
    live.submit_all(submitted)
    with FakeWorker(live.endpoint, make_hello("w0"), step_s=0.002) as first:
        first.registered.wait(10)
        live.sink.wait(lambda: bool(live.sink.tokens))
        with FakeWorker(live.endpoint, make_hello("w1"), step_s=0.002) as second:
            second.registered.wait(10)
            more = records(24, max_tokens=30)
            live.submit_all(more)
            check(live, submitted + more)
            assert first.steps_done > 0
            assert second.steps_done > 0


def test_killed_processes_cost_no_token(live: Live) -> None:
    submitted = records(24, max_tokens=60)
    processes = [start_process(live.endpoint, f"w{i}", 0.005) for i in range(2)]
    try:
        live.sink.wait(lambda: True)
        while live.engine.load().num_workers < 2:
            threading.Event().wait(0.02)
        live.submit_all(submitted)
        live.sink.wait(lambda: sum(map(len, live.sink.tokens.values())) > 24 * 5)
        processes[0].kill()
        check(live, submitted)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert any(live.sink.endings[record.request_id].usage.replays for record in submitted)
    assert live.ask(live.engine.stats).totals["worker_deaths"] >= 1


def test_a_paused_process_is_replaced_and_what_it_says_late_is_void(live: Live) -> None:
    submitted = records(8, max_tokens=60)
    process = start_process(live.endpoint, "w0", 0.005)
    try:
        live.submit_all(submitted)
        live.sink.wait(lambda: sum(map(len, live.sink.tokens.values())) > 20)
        process.send_signal(signal.SIGSTOP)
        with FakeWorker(live.endpoint, make_hello("w1")):
            check(live, submitted)
            process.send_signal(signal.SIGCONT)
            while not live.ask(live.engine.stats).totals.get("frames_dropped_epoch"):
                threading.Event().wait(0.02)
            while live.engine.load().num_workers < 2:  # it registers anew
                threading.Event().wait(0.02)
    finally:
        process.kill()
        process.wait()
