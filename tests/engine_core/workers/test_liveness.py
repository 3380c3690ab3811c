from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.workers.executor import WorkerState
from pagoda_engine_core.workers.liveness import TICK_S, Liveness
from pagoda_proto.times import STALL_S

LIMITS = EngineConfig(worker_suspect_s=1.5, worker_dead_s=3.0, step_deadline_s=60.0)


class Watch:
    """Ticks at the regular interval while time passes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.liveness = Liveness(LIMITS, self.now)
        self.seen: list[tuple[int, WorkerState]] = []

    @property
    def over(self) -> bool:
        return any(not state.alive for _, state in self.seen)

    def pass_time(self, seconds: float, beats: tuple[int, ...] = (), busy_s: float = 0.0) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + TICK_S)
            for epoch in () if self.over else beats:
                self.liveness.beat(epoch, busy_s, self.now)
            self.seen += [(change.epoch, change.state) for change in self.liveness.tick(self.now)]


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    watch.liveness.join(1, watch.now)
    return watch


def test_silence_makes_suspect_then_dead(watch: Watch) -> None:
    watch.pass_time(1.5)
    assert watch.seen == []
    watch.pass_time(0.25)
    assert watch.seen == [(1, WorkerState.SUSPECT)]
    watch.pass_time(1.5)
    assert watch.seen == [(1, WorkerState.SUSPECT), (1, WorkerState.DEAD)]
    with pytest.raises(KeyError):
        watch.liveness.state(1)


def test_a_suspect_that_is_heard_is_ready_again(watch: Watch) -> None:
    watch.pass_time(2.0)
    watch.liveness.beat(1, 0.0, watch.now)
    watch.pass_time(0.25)
    assert watch.seen == [(1, WorkerState.SUSPECT), (1, WorkerState.READY)]


def test_beating_without_advancing_is_hung(watch: Watch) -> None:
    watch.liveness.owes(1, 60.0, watch.now)
    watch.pass_time(60.0, beats=(1,))
    assert watch.seen == []
    watch.pass_time(0.5, beats=(1,))
    assert watch.seen == [(1, WorkerState.HUNG)]


def test_every_plan_has_its_own_deadline(watch: Watch) -> None:
    watch.liveness.owes(1, 60.0, watch.now)
    watch.liveness.owes(1, 10.0, watch.now)
    watch.pass_time(40.0, beats=(1,))
    watch.liveness.answered(1, watch.now)
    watch.pass_time(9.0, beats=(1,))
    assert watch.seen == []
    watch.pass_time(1.5, beats=(1,))
    assert watch.seen == [(1, WorkerState.HUNG)]


def test_a_worker_that_says_it_is_stuck_is_believed(watch: Watch) -> None:
    watch.pass_time(0.25, beats=(1,), busy_s=61.0)
    assert watch.seen == [(1, WorkerState.HUNG)]


def test_a_beat_of_the_step_before_is_nothing_against_the_next(watch: Watch) -> None:
    """Beats and results use two connections, so a beat sent before a step's result may be read after it."""
    watch.liveness.owes(1, 60.0, watch.now)
    watch.liveness.owes(1, 10.0, watch.now)
    watch.pass_time(12.0, beats=(1,), busy_s=11.9)
    watch.liveness.answered(1, watch.now)
    watch.pass_time(9.0, beats=(1,), busy_s=11.9)
    assert watch.seen == []
    watch.pass_time(1.5, beats=(1,), busy_s=11.9)
    assert watch.seen == [(1, WorkerState.HUNG)]


def test_what_a_worker_says_counts_through_our_own_stall(watch: Watch) -> None:
    """We were stalled, but its step was running."""
    watch.liveness.owes(1, 60.0, watch.now)
    watch.pass_time(1.0, beats=(1,))
    watch.now += 70.0
    watch.liveness.tick(watch.now)
    watch.pass_time(0.5, beats=(1,), busy_s=71.0)
    assert watch.seen == [(1, WorkerState.HUNG)]


def test_only_the_oldest_plan_ages(watch: Watch) -> None:
    watch.liveness.owes(1, 60.0, watch.now)
    for _ in range(4):
        watch.pass_time(40.0, beats=(1,))
        watch.liveness.owes(1, 60.0, watch.now)
        watch.liveness.answered(1, watch.now)
    assert watch.seen == []


def test_an_idle_worker_is_never_hung(watch: Watch) -> None:
    watch.liveness.owes(1, 60.0, watch.now)
    watch.liveness.answered(1, watch.now)
    watch.pass_time(100.0, beats=(1,))
    assert watch.seen == []


def test_a_worker_that_never_leaves_after_drain_is_hung(watch: Watch) -> None:
    watch.liveness.drain(1, watch.now)
    assert watch.liveness.state(1) is WorkerState.DRAINING
    watch.pass_time(61.0, beats=(1,))
    assert watch.seen == [(1, WorkerState.HUNG)]


def test_our_own_stall_is_nobodys_death(watch: Watch) -> None:
    watch.liveness.owes(1, 60.0, watch.now)
    watch.now += 600.0
    assert watch.liveness.tick(watch.now) == []
    watch.pass_time(1.0)
    assert watch.seen == []
    watch.pass_time(3.0)
    assert watch.seen[-1] == (1, WorkerState.DEAD)


@settings(max_examples=60)
@given(st.lists(st.floats(min_value=0.0, max_value=TICK_S + STALL_S), max_size=30))
def test_a_worker_heard_in_every_tick_lives(gaps: list[float]) -> None:
    now = 0.0
    liveness = Liveness(LIMITS, now)
    liveness.join(1, now)
    for gap in gaps:
        now += gap
        liveness.beat(1, 0.0, now)
        assert liveness.tick(now) == []
        assert liveness.state(1) is WorkerState.READY


@settings(max_examples=60)
@given(st.lists(st.floats(min_value=0.05, max_value=TICK_S), min_size=62, max_size=80))
def test_a_silent_worker_dies_once_and_is_forgotten(gaps: list[float]) -> None:
    now = 0.0
    liveness = Liveness(LIMITS, now)
    liveness.join(1, now)
    states = []
    for gap in gaps:
        now += gap
        states += [change.state for change in liveness.tick(now)]
    suspect, dead = now > LIMITS.worker_suspect_s, now > LIMITS.worker_dead_s
    expected = [WorkerState.SUSPECT] * suspect + [WorkerState.DEAD] * dead
    assert states == expected
