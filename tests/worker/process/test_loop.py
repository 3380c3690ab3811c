from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.worker.fakes_loop import WAIT_S, FakeEngine, Worker, first_plan, next_plan
from tests.worker.fakes_model import BOMB, HUGE, NUM_BLOCKS, FakeModel, new_row

import pagoda
from pagoda_proto import times
from pagoda_proto.channel import Envelope, encode
from pagoda_proto.errors import PagodaError
from pagoda_proto.steps import (
    Beat,
    BeatAck,
    Chunk,
    Drain,
    Goodbye,
    Hello,
    Refused,
    ResetWorker,
    StepFailed,
    StepPlan,
    StepResult,
    Welcome,
)
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process import models
from pagoda_worker.process.loop import run


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/e"


@pytest.fixture
def engine(endpoint: str) -> Iterator[FakeEngine]:
    made = FakeEngine(endpoint)
    yield made
    made.close()


Start = Callable[..., Worker]


@pytest.fixture
def start(endpoint: str) -> Iterator[Start]:
    """Starts workers, and stops them however the test ends."""
    made: list[Worker] = []

    def begin(model: FakeModel | None = None, config: WorkerConfig | None = None) -> Worker:
        made.append(Worker(config or WorkerConfig(engine=endpoint, worker_id="w-1", drain_timeout_s=0.0), model))
        return made[-1]

    yield begin
    for worker in made:
        worker.end()


@pytest.fixture
def worker(start: Start) -> Worker:
    return start()


def test_hello_tells_what_the_runner_offers(engine: FakeEngine, worker: Worker) -> None:
    engine.admit()
    assert engine.hello is not None
    assert engine.hello.worker_id == "w-1"
    assert engine.hello.num_blocks == NUM_BLOCKS
    assert engine.hello.pid > 0
    assert len(bytes.fromhex(engine.hello.incarnation)) == 8
    assert worker.event("ready")["epoch"] == 1


def test_plans_are_answered_in_order_also_when_two_are_queued(engine: FakeEngine, worker: Worker) -> None:
    engine.admit()
    engine.send(first_plan())
    engine.send(next_plan(2, start=3))
    engine.send(next_plan(3, start=4))
    results = [engine.result() for _ in range(3)]
    assert [result.step for result in results] == [1, 2, 3]
    assert all(len(result.outputs[0].token_ids) == 1 for result in results)


def test_the_worker_waits_for_an_engine_core_that_is_not_there_yet(endpoint: str, worker: Worker) -> None:
    worker.event("registering")
    engine = FakeEngine(endpoint)
    engine.admit()
    worker.event("ready")
    engine.close()


def test_a_refusal_is_tried_again_and_a_final_one_ends_the_worker(engine: FakeEngine, start: Start) -> None:
    worker = start()
    engine.until(Hello)
    engine.send(Refused(reason="duplicate"), epoch=0)
    engine.until(Hello)
    engine.send(Refused(reason="other model", final=True), epoch=0)
    worker.join()
    assert isinstance(worker.error, PagodaError)
    assert "other model" in str(worker.error)


def test_beats_tell_that_a_step_is_running(engine: FakeEngine, start: Start) -> None:
    model = FakeModel(gate=threading.Event())
    start(model)
    engine.admit()
    _, idle = engine.until(Beat)
    assert idle.busy_s == 0.0
    assert idle.rss_bytes > 1_000_000
    engine.send(first_plan())
    assert model.entered.wait(WAIT_S)
    engine.until(Beat)
    _, busy = engine.until(Beat)
    assert busy.busy_s > 0
    assert model.gate is not None
    model.gate.set()
    engine.result()
    engine.until(Beat)
    _, done = engine.until(Beat)
    assert done.busy_s == 0.0


def test_a_lost_lease_ends_the_standing_and_the_same_incarnation_registers_anew_under_the_next_number(
    engine: FakeEngine, worker: Worker
) -> None:
    engine.answer_beats = False
    engine.admit(lease_s=0.3)
    first = engine.hello
    worker.event("ready")
    engine.until(Hello)
    assert first is not None
    assert engine.hello == msgspec.structs.replace(first, registration=first.registration + 1)
    engine.answer_beats = True
    engine.welcome()
    assert worker.event("ready")["epoch"] == 2
    engine.send(first_plan())
    assert engine.result().errors == []


def test_answered_beats_keep_the_lease_alive(engine: FakeEngine, worker: Worker) -> None:
    engine.admit(lease_s=3.0)
    began = time.monotonic()
    while time.monotonic() < began + 4.0:
        engine.until(Beat)
    assert engine.hellos == 1
    engine.send(first_plan())
    assert engine.result().step == 1


def test_a_result_computed_under_a_lost_lease_is_never_sent(engine: FakeEngine, start: Start) -> None:
    model = FakeModel(gate=threading.Event())
    start(model)
    engine.answer_beats = False
    engine.admit(lease_s=0.5)
    engine.send(first_plan())
    assert model.entered.wait(WAIT_S)
    while engine.receive(timeout_s=1.5) is not None:  # beats, until the lease expires and they stop
        pass
    assert model.gate is not None
    model.gate.set()
    seen: list[type] = []
    while Hello not in seen:
        received = engine.receive()
        assert received is not None
        seen.append(type(received[2]))
    assert StepResult not in seen
    engine.welcome()
    engine.send(next_plan(1))  # the row of the earlier epoch is gone
    assert "unknown" in engine.result().errors[0].message


def test_frames_of_another_epoch_or_engine_core_are_dropped(engine: FakeEngine, worker: Worker) -> None:
    engine.admit()
    engine.send(first_plan(row_id=7), epoch=engine.epoch + 5)
    engine.send(first_plan(row_id=7), boot_id="boot-0")
    engine.send(Drain(), kind="/c", epoch=engine.epoch + 5)
    engine.send(first_plan())
    result = engine.result()
    assert [output.row_id for output in result.outputs] == [1]
    assert engine.hellos == 1


def test_malformed_envelopes_are_dropped(engine: FakeEngine, worker: Worker) -> None:
    engine.admit()
    good = encode(Envelope(engine.boot_id, "w-1", engine.epoch, 1), first_plan())
    bad_id, bad_epoch = [good[0], b"\xff\xff", *good[2:]], [*good[:3], b"1", *good[4:]]
    for parts in ([b"x"], good[:5], [b"\xff", *good[1:]], bad_id, bad_epoch):
        engine.send_parts(parts)
        engine.send_parts(parts, "/c")
    engine.send_parts(encode(Envelope(engine.boot_id, "w-2", engine.epoch, 1), first_plan(row_id=9)))
    engine.send(first_plan())
    assert [output.row_id for output in engine.result().outputs] == [1]
    assert engine.hellos == 1


def test_a_frame_of_this_standing_that_cannot_be_read_makes_the_worker_begin_anew(
    engine: FakeEngine, worker: Worker
) -> None:
    engine.admit()
    broken = encode(Envelope(engine.boot_id, "w-1", engine.epoch, 1), first_plan())
    engine.send_parts([*broken[:5], broken[5][:-4]])
    engine.admit()
    engine.send(first_plan())
    assert engine.result().errors == []


def test_parameters_that_are_refused_by_their_own_check_are_an_unreadable_frame(
    engine: FakeEngine, worker: Worker
) -> None:
    engine.admit()
    parts = encode(Envelope(engine.boot_id, "w-1", engine.epoch, 1), first_plan())
    bad = parts[5].replace(b"\xabtemperature\xcb" + bytes(8), b"\xabtemperature\xcb\xc0" + bytes(7))
    assert bad != parts[5]
    engine.send_parts([*parts[:5], bad])
    engine.admit()
    engine.send(first_plan())
    assert engine.result().errors == []


@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_gap_in_the_steps_makes_the_worker_begin_anew(engine: FakeEngine, worker: Worker, step: int) -> None:
    engine.admit()
    engine.send(first_plan(step))
    engine.admit()
    engine.send(first_plan())
    assert engine.result().step == 1


def test_reset_makes_the_worker_begin_anew(engine: FakeEngine, worker: Worker) -> None:
    engine.admit()
    engine.send(first_plan())
    engine.result()
    engine.send(ResetWorker())
    engine.admit()
    engine.send(next_plan(1))
    assert "unknown" in engine.result().errors[0].message


def test_a_welcome_that_nobody_asked_for_is_dropped(engine: FakeEngine, worker: Worker) -> None:
    engine.admit()
    engine.send(Welcome(epoch=2, engine_boot_id=engine.boot_id, lease_s=60.0), epoch=2)
    engine.send(first_plan())
    assert engine.result().step == 1
    assert engine.hellos == 1


def test_an_engine_core_that_has_forgotten_a_worker_gets_it_back(engine: FakeEngine, worker: Worker) -> None:
    engine.admit(lease_s=10 * WAIT_S)
    worker.event("ready")
    engine.until(Beat)
    engine.send(Refused(reason="unknown epoch"), kind="/c", epoch=0)
    engine.admit()
    assert worker.event("ready")["epoch"] == 2
    engine.send(first_plan())
    assert engine.result().errors == []


def test_a_restarted_engine_core_gets_the_worker_back(engine: FakeEngine, endpoint: str, worker: Worker) -> None:
    """At once: a broken connection does not wait for the lease to expire."""
    engine.admit(lease_s=10 * WAIT_S)
    worker.event("ready")
    engine.until(Beat)
    engine.close()
    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
    restarted = FakeEngine(endpoint, "boot-2")
    restarted.epoch = 40
    restarted.admit()
    assert worker.event("ready")["epoch"] == 41
    restarted.send(first_plan())
    assert restarted.result().errors == []
    restarted.close()


@pytest.mark.parametrize("kind", ["/c", "/d"])
def test_drain_finishes_the_running_step_and_says_goodbye(engine: FakeEngine, start: Start, kind: str) -> None:
    model = FakeModel(gate=threading.Event())
    worker = start(model)
    engine.admit()
    engine.send(first_plan())
    assert model.entered.wait(WAIT_S)
    engine.send(Drain(), kind=kind)
    engine.until(Beat)  # answered, so the Drain sent before it has arrived
    engine.until(Beat)
    assert model.gate is not None
    model.gate.set()
    assert engine.result().step == 1
    _, goodbye = engine.until(Goodbye)
    assert goodbye.reason == "drained"
    worker.join()
    assert worker.error is None


def test_stop_says_goodbye(engine: FakeEngine, worker: Worker) -> None:
    engine.admit()
    worker.event("ready")
    worker.stop.set()
    _, goodbye = engine.until(Goodbye)
    assert goodbye.reason == "stopped"
    worker.join()
    assert worker.error is None


def leaving_with_a_row(engine: FakeEngine, start: Start, drain_timeout_s: float) -> Worker:
    """A worker that was asked to stop while it held a row, and has reported this."""
    config = WorkerConfig(engine=engine.endpoint, worker_id="w-1", drain_timeout_s=drain_timeout_s)
    worker = start(config=config)
    engine.admit()
    engine.send(first_plan())
    engine.result()
    worker.stop.set()
    while not engine.until(Beat)[1].leaving:
        pass
    return worker


def test_a_worker_that_is_to_leave_goes_on_with_its_rows(engine: FakeEngine, start: Start) -> None:
    worker = leaving_with_a_row(engine, start, 600.0)
    engine.send(StepPlan(step=2, chunks=[Chunk(1, 3, 1, True)]))
    assert engine.result().step == 2
    assert worker.thread.is_alive()
    engine.send(StepPlan(step=3, finished_rows=[1]))
    assert engine.result().step == 3
    assert engine.until(Goodbye)[1].reason == "stopped"
    worker.join()
    assert worker.error is None


def test_a_worker_that_is_dismissed_does_not_wait_for_its_rows(engine: FakeEngine, start: Start) -> None:
    worker = leaving_with_a_row(engine, start, 600.0)
    engine.send(Drain(), kind="/c")
    assert engine.until(Goodbye)[1].reason == "drained"
    worker.join()


def test_a_worker_whose_rows_nobody_takes_leaves_in_the_end(engine: FakeEngine, start: Start) -> None:
    worker = leaving_with_a_row(engine, start, 0.5)
    engine.until(Goodbye)
    worker.join()


def test_stop_while_no_engine_core_is_there(worker: Worker) -> None:
    worker.event("registering")
    worker.stop.set()
    worker.join()
    assert worker.error is None


@pytest.mark.parametrize(("token", "offered"), [(BOMB, 2048), (HUGE, 1024)])
def test_a_lost_step_is_told_and_the_worker_begins_anew(
    engine: FakeEngine, start: Start, token: int, offered: int
) -> None:
    """With steps half as large if it ran out of memory."""
    start()
    engine.admit()
    assert engine.hello is not None
    assert engine.hello.max_tokens_per_step == 2048
    engine.send(first_plan())
    assert engine.result().errors == []
    bad = StepPlan(step=2, new_rows=[new_row(2, [token], [2])], chunks=[Chunk(2, 0, 1, True)])
    engine.send(bad)
    envelope, failed = engine.until(StepFailed)
    assert (envelope.engine_boot_id, envelope.epoch) == (engine.boot_id, engine.epoch)
    assert failed.step == 2
    assert ("out of memory" in failed.reason) == (token == HUGE)
    engine.admit()
    assert (engine.hello.registration, engine.hello.max_tokens_per_step) == (2, offered)
    engine.send(next_plan(1))
    assert "unknown" in engine.result().errors[0].message
    engine.send(first_plan(step=2))
    assert engine.result().errors == []


def test_an_idle_worker_registers_anew_to_offer_larger_steps_again(
    engine: FakeEngine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "BUDGET_RESTORE_S", 0.5)
    monkeypatch.setattr(times, "IDLE_S", 0.1)
    start()
    engine.admit()
    engine.send(StepPlan(step=1, new_rows=[new_row(2, [HUGE], [2])], chunks=[Chunk(2, 0, 1, True)]))
    engine.until(StepFailed)
    engine.admit()
    assert engine.hello is not None
    while engine.hello.max_tokens_per_step < 2048:
        engine.admit()


def test_a_step_that_breaks_the_runner_ends_the_process_without_a_goodbye(engine: FakeEngine, start: Start) -> None:
    worker = start()
    worker.runner.launch = broken  # type: ignore[method-assign]
    engine.admit()
    engine.send(first_plan())
    worker.join()
    assert isinstance(worker.error, KeyError)
    while (received := engine.receive(timeout_s=0.2)) is not None:
        assert not isinstance(received[2], Goodbye)


def broken(plan: StepPlan) -> StepResult:
    raise KeyError(plan.step)


# --- with a real model ------------------------------------------------------------------------------------------------

DEMO_MODEL = Path(pagoda.__file__).parent / "demo_model"


def demo_config(endpoint: str) -> WorkerConfig:
    return WorkerConfig(
        model=str(DEMO_MODEL),
        engine=endpoint,
        num_blocks=8,
        block_size=16,
        max_model_len=64,
        threads=1,
        drain_timeout_s=0.0,
    )


def test_run_loads_the_model_and_serves_it(engine: FakeEngine, endpoint: str, start: Start) -> None:
    worker = start(config=demo_config(endpoint))
    engine.admit()
    assert engine.hello is not None
    assert (engine.hello.num_blocks, engine.hello.max_model_len) == (8, 64)
    assert 0 < engine.hello.start_s < 300
    engine.send(first_plan())
    assert len(engine.result().outputs[0].token_ids) == 1
    worker.stop.set()
    engine.until(Goodbye)
    worker.join()
    events = [worker.events.get() for _ in range(worker.events.qsize())]
    loading = [(event["bytes"], event["of"]) for event in events if event["event"] == "loading"]
    assert loading == sorted(loading)
    assert loading[-1][0] == loading[-1][1]
    assert [event["event"] for event in events[len(loading) :]] == ["loaded", "registering", "ready"]
    assert events[len(loading)]["num_blocks"] == 8


def test_a_start_took_what_the_process_took_that_it_is_a_fork_of(
    engine: FakeEngine, endpoint: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "kept_s", lambda config: 1000.0)
    start(config=demo_config(endpoint))
    engine.admit()
    assert engine.hello is not None
    assert 1000 < engine.hello.start_s < 1300


def test_run_stops_while_it_is_loading(endpoint: str) -> None:
    stop, events = threading.Event(), []
    stop.set()
    run(demo_config(endpoint), events.append, stop)
    assert events == []


def test_run_tells_of_a_bad_address_before_it_loads() -> None:
    with pytest.raises(ValueError, match="engine"):
        run(demo_config("tcp://10.1.2.3:80"), [].append, threading.Event())


# --- a process of its own ---------------------------------------------------------------------------------------------

PROCESS = """
import signal, sys, threading
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.loop import serve
from tests.worker.fakes_model import fake_runner

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
serve(fake_runner(), WorkerConfig(engine=sys.argv[1], worker_id="w-1", drain_timeout_s=0.0), lambda event: None, stop)
"""


@pytest.fixture
def process(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", PROCESS, endpoint], cwd=root) as made:
        yield made
        made.kill()


@pytest.mark.e2e
def test_sigterm_ends_the_process_with_a_goodbye(engine: FakeEngine, process: subprocess.Popen[bytes]) -> None:
    engine.admit()
    assert engine.hello is not None
    assert engine.hello.pid == process.pid
    engine.until(Beat)
    process.terminate()
    engine.until(Goodbye)
    assert process.wait(WAIT_S) == 0


@pytest.mark.e2e
def test_a_process_that_was_stopped_past_its_lease_emits_nothing_of_its_old_life(
    engine: FakeEngine, process: subprocess.Popen[bytes]
) -> None:
    engine.admit(lease_s=1.0)
    engine.until(Beat)
    process.send_signal(signal.SIGSTOP)
    engine.send(first_plan())
    engine.send(BeatAck(), kind="/c")
    engine.answer_beats = False
    while engine.receive(timeout_s=1.5) is not None:  # what was in flight, then silence beyond the lease
        pass
    process.send_signal(signal.SIGCONT)
    received = engine.receive()
    while received is not None and not isinstance(received[2], Hello):
        assert not isinstance(received[2], StepResult)
        received = engine.receive()
    assert received is not None
    engine.welcome()
    engine.send(next_plan(1))
    assert "unknown" in engine.result().errors[0].message


STUCK = """
import sys, threading, time
from pagoda_proto import times
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.loop import serve
from tests.worker.fakes_model import fake_runner

times.STUCK_EXIT_S = 0.5
runner = fake_runner()
runner.launch = lambda plan: time.sleep(1000)
serve(runner, WorkerConfig(engine=sys.argv[1], worker_id="w-1"), lambda event: None, threading.Event())
"""


@pytest.mark.e2e
def test_a_process_stuck_in_a_step_nobody_waits_for_ends_itself(engine: FakeEngine, endpoint: str) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, endpoint], cwd=Path(__file__).parents[3]) as process:
        try:
            engine.admit(lease_s=1.0)
            engine.until(Beat)
            engine.send(first_plan())
            engine.answer_beats = False
            assert process.wait(WAIT_S) == 1
        finally:
            process.kill()


HELD_UP = """
import pathlib, sys, threading, time
from pagoda_proto import times
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.loop import serve
from tests.worker.fakes_model import fake_runner

times.STUCK_EXIT_S = 3.0
runner, go_on = fake_runner(), pathlib.Path(sys.argv[2])
launch = runner.launch

def slow_launch(plan):
    while not go_on.exists():
        time.sleep(0.01)
    return launch(plan)

runner.launch = slow_launch
serve(runner, WorkerConfig(engine=sys.argv[1], worker_id="w-1"), lambda event: None, threading.Event())
"""


@pytest.mark.e2e
def test_a_process_that_was_stopped_in_a_step_does_not_take_itself_for_stuck(
    engine: FakeEngine, endpoint: str, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", HELD_UP, endpoint, str(tmp_path / "go-on")]
    with subprocess.Popen(arguments, cwd=Path(__file__).parents[3]) as process:
        try:
            engine.admit(lease_s=1.0)
            engine.until(Beat)
            engine.send(first_plan())
            while engine.until(Beat)[1].busy_s == 0:
                pass
            process.send_signal(signal.SIGSTOP)
            time.sleep(4.5)  # longer than a stuck step may last
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            (tmp_path / "go-on").touch()
            engine.admit()
            engine.send(first_plan())
            assert engine.result().errors == []
        finally:
            process.kill()
