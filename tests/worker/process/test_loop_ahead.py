"""The loop with a device that works asynchronously: when it launches, when it answers, what it drops."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.worker.fakes_accelerator import FakeAccelerator, HeldFetch
from tests.worker.fakes_loop import WAIT_S, FakeEngine, Worker, first_plan, next_plan
from tests.worker.fakes_model import FakeModel

from pagoda_proto.steps import Beat, Drain, Goodbye, Hello
from pagoda_worker.config import WorkerConfig


class OpenFetch(HeldFetch):
    """A fetch whose `wait` blocks until the test releases it, like a device that is still computing."""

    def __init__(self, tensors: Sequence[torch.Tensor], journal: list[str]) -> None:
        super().__init__(tensors, journal)
        self.event = threading.Event()

    def release(self) -> None:
        super().release()
        self.event.set()

    def wait(self) -> list[torch.Tensor]:
        if not self.event.wait(WAIT_S):
            raise RuntimeError("nobody released the fetch")
        return super().wait()


class SlowDevice(FakeAccelerator):
    """Announces every fetch, so that a test can wait for the launch it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = threading.Semaphore(0)

    def fetch(self, *tensors: torch.Tensor) -> HeldFetch:
        self.fetches.append(OpenFetch(tensors, self.journal))
        self.launched.release()
        return self.fetches[-1]

    def synchronize(self) -> None:
        super().synchronize()
        for fetch in self.fetches:
            fetch.release()

    def await_launch(self) -> None:
        assert self.launched.acquire(timeout=WAIT_S)


class Stage:
    """An engine core, and a worker with a slow device."""

    def __init__(self, endpoint: str) -> None:
        self.engine = FakeEngine(endpoint)
        self.device = SlowDevice()
        self.worker = Worker(
            WorkerConfig(engine=endpoint, worker_id="w-1", drain_timeout_s=0.0), FakeModel(), self.device
        )

    def close(self) -> None:
        self.worker.stop.set()
        while self.worker.thread.is_alive():
            for fetch in list(self.device.fetches):
                fetch.release()
            self.worker.thread.join(0.05)
        self.engine.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(f"ipc://{tmp_path}/e")
    yield made
    made.close()


def test_the_second_plan_is_launched_before_the_first_is_answered(stage: Stage) -> None:
    engine, device = stage.engine, stage.device
    engine.admit()
    engine.send(first_plan())
    device.await_launch()
    engine.send(next_plan(2, start=3))
    device.await_launch()
    assert [fetch.done() for fetch in device.fetches] == [False, False]
    device.fetches[0].release()
    assert engine.result().step == 1
    assert not device.fetches[1].done()
    device.fetches[1].release()
    assert engine.result().step == 2


def test_a_step_is_answered_when_it_is_over_though_no_plan_follows(stage: Stage) -> None:
    stage.engine.admit()
    stage.engine.send(first_plan())
    stage.device.await_launch()
    stage.device.fetches[0].release()
    assert stage.engine.result().step == 1


def test_beats_tell_of_the_oldest_step_under_way(stage: Stage) -> None:
    engine, device = stage.engine, stage.device
    engine.admit()
    engine.send(first_plan())
    device.await_launch()
    engine.until(Beat)
    _, busy = engine.until(Beat)
    assert busy.busy_s > 0
    device.fetches[0].release()
    engine.result()
    engine.until(Beat)
    _, idle = engine.until(Beat)
    assert idle.busy_s == 0.0


def test_drain_answers_everything_under_way_before_goodbye(stage: Stage) -> None:
    engine, device = stage.engine, stage.device
    engine.admit()
    engine.send(first_plan())
    engine.send(next_plan(2, start=3))
    device.await_launch()
    device.await_launch()
    engine.send(Drain(), kind="/c")
    engine.until(Beat)  # answered, so the Drain sent before it has arrived
    engine.until(Beat)
    for fetch in device.fetches:
        fetch.release()
    assert [engine.result().step for _ in range(2)] == [1, 2]
    assert engine.until(Goodbye)[1].reason == "drained"


def test_a_lost_lease_drops_what_was_launched(stage: Stage) -> None:
    engine, device = stage.engine, stage.device
    engine.answer_beats = False
    engine.admit(lease_s=0.5)
    engine.send(first_plan())
    device.await_launch()
    engine.until(Hello)
    assert device.journal == ["synchronized"]
    engine.answer_beats = True
    engine.welcome()
    engine.send(next_plan(1))  # a result of the earlier epoch would arrive first
    result = engine.result()
    assert result.outputs == []
    assert "unknown" in result.errors[0].message
