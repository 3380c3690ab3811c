from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine_core.fake_worker import FakeWorker, Peer, make_hello, start_process

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.workers.executor import (
    ExecutorEvent,
    LeaveCause,
    StepDone,
    WorkerChanged,
    WorkerJoined,
    WorkerLeft,
    WorkerState,
)
from pagoda_engine_core.workers.zmq_executor import ZmqExecutor
from pagoda_proto.addresses import host_id
from pagoda_proto.channel import MAX_FRAME_BYTES, NUM_PARTS
from pagoda_proto.steps import (
    SPOKEN,
    Beat,
    BeatAck,
    Drain,
    Goodbye,
    KVGroup,
    Refused,
    ResetWorker,
    StepFailed,
    StepPlan,
    StepResult,
    Versions,
    Welcome,
)
from pagoda_proto.times import STEP_DEADLINE_LEAST_S, STEP_DEADLINE_S


class Engine:
    """An executor, pumped by the test's thread."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
        spoken: Versions = SPOKEN,
        **config: float,
    ) -> None:
        named = EngineConfig(worker_endpoint=f"ipc://{directory}/w.sock", **config)
        self.executor = ZmqExecutor(named, "boot-1", clock, spoken)
        self.seen: list[ExecutorEvent] = []
        self.peers: list[Peer] = []

    def peer(self, worker_id: str = "w0", **fields: object) -> Peer:
        peer = Peer(self.executor.endpoint, make_hello(worker_id, **fields))
        self.peers.append(peer)
        return peer

    def pump(self, until: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"seen: {self.seen}, counted: {dict(self.executor.counters())}")
            self.seen += self.executor.wait(0.05)

    def next(self, kind: type[ExecutorEvent]) -> ExecutorEvent:
        self.pump(lambda: any(isinstance(event, kind) for event in self.seen))
        event = next(event for event in self.seen if isinstance(event, kind))
        self.seen.remove(event)
        return event

    def counted(self, reason: str) -> None:
        self.pump(lambda: self.executor.counters().get(f"frames_dropped_{reason}", 0) > 0)

    def answers(self, socket: zmq.Socket[bytes]) -> None:
        """Pump until the socket has something to receive."""
        self.pump(lambda: socket.poll(0) > 0)

    def admit(self, peer: Peer) -> int:
        peer.say_hello()
        joined = self.next(WorkerJoined)
        assert isinstance(joined, WorkerJoined)
        _, welcome = peer.receive()
        assert isinstance(welcome, Welcome)
        assert welcome.epoch == joined.epoch
        peer.boot_id, peer.epoch = welcome.engine_boot_id, welcome.epoch
        return joined.epoch

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.executor.close()


@pytest.fixture
def engine(socket_dir: Path) -> Iterator[Engine]:
    engine = Engine(socket_dir)
    yield engine
    engine.close()


def test_plans_reach_the_worker_and_results_come_back(engine: Engine) -> None:
    peer = engine.peer()
    epoch = engine.admit(peer)
    for step in (1, 2):
        engine.executor.send(epoch, StepPlan(step=step))
    for step in (1, 2):
        envelope, message = peer.receive()
        assert (envelope.epoch, message) == (epoch, StepPlan(step=step))
        peer.send(StepResult(step=step))
    for step in (1, 2):
        assert engine.next(StepDone) == StepDone(epoch, StepResult(step=step))
    assert engine.executor.workers()[0].steps_done == 2


def test_beats_are_answered_on_the_control_route(engine: Engine) -> None:
    peer = engine.peer()
    engine.admit(peer)
    peer.beat()
    engine.answers(peer.control)
    assert peer.receive(peer.control)[1] == BeatAck()
    assert not peer.data.poll(0)


def test_drain_goes_over_control_and_goodbye_ends_the_life(engine: Engine) -> None:
    peer = engine.peer()
    epoch = engine.admit(peer)
    peer.beat()
    engine.answers(peer.control)
    peer.receive(peer.control)
    engine.executor.send(epoch, Drain())
    assert engine.next(WorkerChanged) == WorkerChanged(epoch, WorkerState.DRAINING)
    assert peer.receive(peer.control)[1] == Drain()
    peer.send(Goodbye(reason="drained"))
    assert engine.next(WorkerLeft) == WorkerLeft(epoch, LeaveCause.LEFT, "drained")
    assert engine.executor.workers()[0].state is WorkerState.GONE


def test_a_drained_worker_whose_control_route_is_not_there_hears_it_over_data(engine: Engine) -> None:
    peer = Peer(engine.executor.endpoint, make_hello(), with_control=False)
    engine.peers.append(peer)
    engine.executor.send(engine.admit(peer), Drain())
    assert peer.receive()[1] == Drain()


def test_reset_ends_the_life_and_the_worker_registers_anew(engine: Engine) -> None:
    peer = engine.peer()
    epoch = engine.admit(peer)
    engine.executor.send(epoch, ResetWorker())
    left = engine.next(WorkerLeft)
    assert left.cause is LeaveCause.RESET
    assert peer.receive()[1] == ResetWorker()
    peer.renew()
    assert engine.admit(peer) > epoch


def test_a_second_registration_of_the_same_process_voids_the_first_life(engine: Engine) -> None:
    peer = engine.peer()
    first = engine.admit(peer)
    peer.renew()
    second = engine.admit(peer)
    assert second > first
    left = engine.next(WorkerLeft)
    assert (left.epoch, left.cause) == (first, LeaveCause.RENEWED)
    peer.send(StepResult(step=1), epoch=first)
    engine.counted("epoch")


def test_a_worker_comes_back_while_its_old_connections_still_stand(engine: Engine) -> None:
    """As after a link broke in one direction: this end sees two live connections, the old one silent."""
    peer = engine.peer()
    engine.admit(peer)
    old = peer.data
    peer.renew()
    epoch = engine.admit(peer)
    assert not old.closed
    engine.executor.send(epoch, StepPlan(step=1))
    assert peer.receive()[1] == StepPlan(step=1)
    peer.send(StepResult(step=1))
    assert engine.next(StepDone).epoch == epoch


def test_hellos_that_piled_up_begin_one_life(engine: Engine) -> None:
    peer = engine.peer()
    for _ in range(5):
        peer.say_hello()
    joined = engine.next(WorkerJoined)
    for _ in range(5):
        engine.pump(lambda: peer.data.poll(0) > 0)
        _, welcome = peer.receive()
        assert isinstance(welcome, Welcome)
        assert welcome.epoch == joined.epoch
    assert engine.seen == []


def test_a_hello_that_comes_after_plans_changes_nothing(engine: Engine) -> None:
    peer = engine.peer()
    epoch = engine.admit(peer)
    engine.executor.send(epoch, StepPlan(step=1))
    peer.send(peer.hello, engine_boot_id="", epoch=0)
    peer.send(StepResult(step=1))
    assert engine.next(StepDone).epoch == epoch
    assert peer.receive()[1] == StepPlan(step=1)
    assert not peer.data.poll(0)
    assert engine.seen == []


@pytest.mark.parametrize("over", [True, False])
def test_a_hello_of_an_earlier_registration_is_stale(engine: Engine, over: bool) -> None:
    peer = engine.peer()
    engine.admit(peer)
    first, hello = peer.data, peer.hello
    peer.renew()
    epoch = engine.admit(peer)
    if over:
        peer.send(Goodbye())
        engine.next(WorkerLeft)
        engine.next(WorkerLeft)
    peer.send(hello, first, engine_boot_id="", epoch=0)
    engine.counted("registration")
    assert not any(isinstance(event, WorkerJoined) for event in engine.seen)
    alive = [worker.epoch for worker in engine.executor.workers() if worker.state.alive]
    assert alive == ([] if over else [epoch])


def test_a_step_that_raised_ends_the_life_and_says_which(engine: Engine) -> None:
    peer = engine.peer()
    epoch = engine.admit(peer)
    engine.executor.send(epoch, StepPlan(step=1))
    peer.send(StepFailed(step=1, reason="out of memory"))
    assert engine.next(WorkerLeft) == WorkerLeft(epoch, LeaveCause.STEP_FAILED, "out of memory", 1)
    peer.renew()
    peer.hello = msgspec.structs.replace(peer.hello, max_tokens_per_step=64)
    engine.admit(peer)
    assert engine.executor.workers()[0].hello.max_tokens_per_step == 64


def test_a_duplicate_worker_id_is_refused_while_the_first_lives(engine: Engine) -> None:
    first, second = engine.peer(), engine.peer()
    epoch = engine.admit(first)
    second.say_hello()
    engine.pump(lambda: second.data.poll(0) > 0)
    _, refused = second.receive()
    assert isinstance(refused, Refused)
    assert "duplicate_id" in refused.reason
    assert not refused.final
    first.send(Goodbye())
    engine.next(WorkerLeft)
    assert engine.admit(second) > epoch


@pytest.mark.parametrize(
    ("fields", "reason", "final"),
    [
        ({"model_fingerprint": "other"}, "model_fingerprint", True),
        ({"numerics_id": "other"}, "numerics_id", False),
        ({"vocab_size": 7}, "vocab_size", True),
        ({"max_model_len": 7}, "max_model_len", True),
        ({"protocol": 99}, "protocol", True),
        ({"num_blocks": 0}, "num_blocks", True),
        ({"kv_groups": (KVGroup(8),) * 9}, "kv_groups", True),
        ({"kv_groups": (KVGroup(8), KVGroup(0, 4))}, "num_blocks", True),
        ({"kv_groups": (KVGroup(8, num_swap_blocks=-1),)}, "num_swap_blocks", True),
        ({"kv_groups": (KVGroup(64), KVGroup(18, 4))}, "kv_groups", True),
        ({"kv_groups": (KVGroup(8, swap_block_s=-1.0),)}, "swap_block_s", True),
        ({"start_s": float("inf")}, "start_s", True),
        ({"start_s": float("nan")}, "start_s", True),
        ({"kv_groups": (KVGroup(2**30), KVGroup(2**30))}, "num_blocks", True),
        ({"block_size": -1}, "block_size", True),
        ({"max_rows": 0}, "max_rows", True),
    ],
)
def test_workers_that_do_not_match_are_refused(
    engine: Engine, fields: dict[str, object], reason: str, final: bool
) -> None:
    engine.admit(engine.peer())
    peer = engine.peer("w1", **fields)
    peer.say_hello()
    engine.pump(lambda: peer.data.poll(0) > 0)
    _, refused = peer.receive()
    assert isinstance(refused, Refused)
    assert refused.reason.startswith(reason)
    assert refused.final is final
    assert not any(isinstance(event, WorkerJoined) for event in engine.seen)


def test_other_numerics_may_come_when_nobody_is_left_and_no_request_needs_the_old_ones(engine: Engine) -> None:
    peer, other = engine.peer(), engine.peer("w1", numerics_id="other")
    engine.admit(peer)
    peer.send(Goodbye())
    other.say_hello()
    engine.next(WorkerLeft)
    engine.pump(lambda: other.data.poll(0) > 0)
    refused = other.receive()[1]
    assert isinstance(refused, Refused)
    assert "fake-numerics" in refused.reason
    assert not refused.final
    engine.executor.hold("")
    other.renew()
    engine.admit(other)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": 77}, "epoch"),
        ({"engine_boot_id": "boot-0"}, "boot_id"),
        ({"worker_id": "somebody"}, "worker_id"),
        ({"sequence": 0}, "sequence"),
    ],
)
def test_frames_of_another_life_are_dropped_and_counted(
    engine: Engine, changes: dict[str, object], reason: str
) -> None:
    peer = engine.peer()
    epoch = engine.admit(peer)
    engine.executor.send(epoch, StepPlan(step=1))
    peer.send(StepResult(step=1), **changes)
    engine.counted(reason)
    assert not any(isinstance(event, StepDone) for event in engine.seen)
    peer.send(StepResult(step=1))
    engine.next(StepDone)


def test_a_life_that_is_over_is_told_so_on_its_control_route(engine: Engine) -> None:
    peer = engine.peer()
    peer.boot_id, peer.epoch = "boot-0", 3  # of a previous engine core
    peer.beat()
    engine.counted("boot_id")
    envelope, refused = peer.receive(peer.control)
    assert isinstance(refused, Refused)
    assert not refused.final
    assert envelope.epoch == 0
    engine.admit(peer)
    peer.send(Beat(busy_s=0.0), peer.control, epoch=99)
    peer.beat()
    engine.counted("epoch")
    engine.answers(peer.control)
    assert peer.receive(peer.control)[1] == BeatAck()


def test_a_stranger_cannot_speak_for_a_worker(engine: Engine) -> None:
    peer, stranger = engine.peer(), engine.peer("w1")
    engine.admit(peer)
    stranger.boot_id, stranger.epoch = peer.boot_id, peer.epoch
    stranger.send(StepResult(step=1), worker_id="w0")
    engine.counted("route")


def test_a_result_that_was_not_due_ends_the_life(engine: Engine) -> None:
    peer = engine.peer()
    epoch = engine.admit(peer)
    engine.executor.send(epoch, StepPlan(step=1))
    peer.send(StepResult(step=2))
    left = engine.next(WorkerLeft)
    assert (left.epoch, left.cause) == (epoch, LeaveCause.MISANSWERED)


def test_results_over_control_and_beats_over_data_are_not_taken(engine: Engine) -> None:
    peer = engine.peer()
    engine.executor.send(engine.admit(peer), StepPlan(step=1))
    peer.send(StepResult(step=1), peer.control)
    engine.counted("unexpected")


def test_silence_makes_suspect_then_dead_and_late_frames_are_void(socket_dir: Path) -> None:
    engine = Engine(socket_dir, worker_suspect_s=0.3, worker_dead_s=0.6)
    try:
        peer = engine.peer()
        epoch = engine.admit(peer)
        assert engine.next(WorkerChanged) == WorkerChanged(epoch, WorkerState.SUSPECT)
        left = engine.next(WorkerLeft)
        assert (left.epoch, left.cause) == (epoch, LeaveCause.SILENT)
        peer.beat()
        engine.counted("epoch")
        assert engine.executor.workers()[0].state is WorkerState.DEAD
    finally:
        engine.close()


def test_when_we_were_paused_ourselves_nobody_is_dead(socket_dir: Path) -> None:
    slept_s = 0.0
    engine = Engine(socket_dir, clock=lambda: time.monotonic() + slept_s, step_deadline_s=10.0)
    try:
        peer = engine.peer()
        epoch = engine.admit(peer)
        engine.executor.send(epoch, StepPlan(step=1))
        slept_s = 30.0
        for _ in range(3):
            engine.seen += engine.executor.wait(0)
        assert engine.seen == []
        peer.send(StepResult(step=1))
        engine.next(StepDone)
    finally:
        engine.close()


class Ahead:
    """A clock that the test can advance, in steps too small to count as our own stall even with the time that the test
    itself takes."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s

    def advance(self, engine: Engine, peer: Peer, seconds: float) -> None:
        end = self() + seconds
        while self() < end:
            self.ahead_s += max(0.0, min(end - self(), 0.5))
            peer.beat(busy_s=0.1)
            engine.pump(lambda: peer.control.poll(0) > 0 or any(isinstance(e, WorkerLeft) for e in engine.seen))
            while peer.control.poll(0):
                peer.receive(peer.control)


def test_a_worker_that_beats_but_never_answers_is_hung(socket_dir: Path) -> None:
    clock = Ahead()
    engine = Engine(socket_dir, clock)
    try:
        peer = engine.peer()
        epoch = engine.admit(peer)
        engine.executor.send(epoch, StepPlan(step=1))
        clock.advance(engine, peer, STEP_DEADLINE_S - 5)
        assert engine.seen == []
        clock.advance(engine, peer, 6)
        assert engine.next(WorkerLeft).cause is LeaveCause.HUNG
    finally:
        engine.close()


def test_a_step_that_is_due_sooner_hangs_sooner(socket_dir: Path) -> None:
    clock = Ahead()
    engine = Engine(socket_dir, clock)
    try:
        peer = engine.peer()
        epoch = engine.admit(peer)
        engine.executor.send(epoch, StepPlan(step=1), STEP_DEADLINE_LEAST_S)
        clock.advance(engine, peer, STEP_DEADLINE_LEAST_S + 5)
        assert engine.next(WorkerLeft).cause is LeaveCause.HUNG
    finally:
        engine.close()


def test_a_killed_process_is_seen_by_its_pidfd_long_before_its_beats_are_missed(socket_dir: Path) -> None:
    engine = Engine(
        socket_dir, worker_suspect_s=300.0, worker_dead_s=600.0, worker_lease_s=700.0, step_deadline_s=800.0
    )
    process = start_process(engine.executor.endpoint, "w0")
    try:
        joined = engine.next(WorkerJoined)
        process.send_signal(signal.SIGKILL)
        left = engine.next(WorkerLeft)
        assert (left.epoch, left.cause) == (joined.epoch, LeaveCause.DIED)
        assert str(process.pid) in left.reason
    finally:
        process.kill()
        process.wait()
        engine.close()


def test_a_hello_of_a_process_that_is_gone_is_not_admitted(engine: Engine) -> None:
    process = start_process("ipc:///nowhere", "w0")
    process.kill()
    process.wait()
    engine.peer(host_id=host_id(), pid=process.pid).say_hello()
    engine.counted("process_gone")


def test_wake_ends_a_wait_from_another_thread(engine: Engine) -> None:
    done = threading.Event()

    def wait() -> None:
        engine.executor.wait(60)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    engine.executor.wake()
    assert done.wait(10)
    thread.join()


def test_a_wait_is_never_too_short(engine: Engine) -> None:
    """A caller woken too early would poll again and again until its time has come."""
    for timeout_s in (0.0001, 0.0004, 0.0013):
        began = time.monotonic()
        assert engine.executor.wait(timeout_s) == []
        assert time.monotonic() - began >= timeout_s


@pytest.fixture
def timeless(socket_dir: Path) -> Iterator[Engine]:
    """An executor whose clock stands still, so no worker is ever silent for long."""
    engine = Engine(socket_dir, clock=lambda: 0.0)
    yield engine
    engine.close()


def test_malformed_frames_harm_nobody(timeless: Engine) -> None:
    engine = timeless
    peer, rogue = engine.peer(), engine.peer("rogue")
    epoch = engine.admit(peer)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.binary(max_size=64), min_size=1, max_size=NUM_PARTS + 2),
        st.one_of(st.none(), st.integers(0, NUM_PARTS - 1)),
    )
    def fuzz(parts: list[bytes], keep: int | None) -> None:
        if keep is not None:  # a good frame with one part replaced
            good = rogue.frame(StepResult(step=1), engine_boot_id="boot-1", epoch=epoch, worker_id="w0")
            parts = [*good[:keep], parts[0], *good[keep + 1 :]]
        rogue.data.send_multipart(parts)
        assert engine.executor.wait(0) == []

    fuzz()
    rogue.data.send_multipart([b"last"])
    engine.counted("malformed")
    good = peer.frame(StepResult(step=1))
    for payload in (b"", b"\xc1", b"\x81\xa4type\xa6result", b"\x91" * 5000, good[-1][:-3]):
        peer.data.send_multipart([*peer.frame(StepResult(step=1))[:-1], payload])
    engine.executor.send(epoch, StepPlan(step=1))
    peer.send(StepResult(step=1))
    assert engine.next(StepDone).epoch == epoch
    assert not any(isinstance(event, WorkerLeft) for event in engine.seen)


def test_bytes_that_are_not_zmq_harm_nobody(engine: Engine, socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(str(socket_dir / "w.sock"))
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        engine.admit(engine.peer())


def test_a_living_predecessor_is_not_robbed_but_a_dead_ones_socket_is_replaced(
    engine: Engine, socket_dir: Path
) -> None:
    with pytest.raises(OSError, match="another process is listening"):
        ZmqExecutor(EngineConfig(worker_endpoint=engine.executor.endpoint), "boot-2")
    stale = socket_dir / "stale.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(stale))
    successor = ZmqExecutor(EngineConfig(worker_endpoint=f"ipc://{stale}"), "boot-2")
    successor.close()
    assert not stale.exists()


def test_a_worker_registers_with_the_next_life_of_the_engine_core(socket_dir: Path) -> None:
    endpoint = f"ipc://{socket_dir}/w.sock"
    config = EngineConfig(worker_endpoint=endpoint, worker_suspect_s=0.2, worker_dead_s=0.3, worker_lease_s=0.5)
    first = ZmqExecutor(config, "boot-1")
    with FakeWorker(endpoint) as worker:
        while not worker.registered.is_set():
            first.wait(0.05)
        first.close()
        second = ZmqExecutor(config, "boot-2")
        try:
            events: list[ExecutorEvent] = []
            while not events:
                events = second.wait(0.05)
            assert isinstance(events[0], WorkerJoined)
        finally:
            worker.stop()
            second.close()


def test_a_frame_above_the_limit_does_not_get_in(engine: Engine) -> None:
    rogue, peer = engine.peer("rogue"), engine.peer()
    monitor = rogue.data.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    rogue.data.send(bytes(MAX_FRAME_BYTES + 1))
    engine.pump(lambda: monitor.poll(0) > 0)
    rogue.data.disable_monitor()
    monitor.close()
    engine.admit(peer)
    assert "frames_dropped_malformed" not in engine.executor.counters()
