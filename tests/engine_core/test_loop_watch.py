from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pagoda_engine_core.loop_watch import LOOK_S, LoopWatch, keep_touching
from pagoda_proto.health.sign_file import SignFile


def look_for(watch: LoopWatch, now: float, seconds: float, rounds: float) -> tuple[bool, float]:
    stuck, end = False, now + seconds
    while now < end:
        now += LOOK_S
        stuck |= watch.look(rounds, now)
    return stuck, now


def test_a_loop_that_does_not_come_round_is_stuck() -> None:
    watch = LoopWatch(8.0, 0.0, 100.0)
    stuck, now = look_for(watch, 100.0, 8.0, 0.0)
    assert not stuck
    assert look_for(watch, now, 1.0, 0.0)[0]


def test_a_process_that_was_stopped_is_not_stuck() -> None:
    watch = LoopWatch(8.0, 0.0, 100.0)
    _, now = look_for(watch, 100.0, 7.0, 0.0)
    assert not watch.look(0.0, now + 600.0)
    assert look_for(watch, now + 600.0, 2.0, 0.0)[0]


@given(st.lists(st.tuples(st.floats(0.0, 900.0), st.booleans()), max_size=60))
def test_whoever_comes_round_between_looks_is_never_stuck(looks: list[tuple[float, bool]]) -> None:
    watch, now, rounds = LoopWatch(8.0, 0.0, 0.0), 0.0, 0.0
    for gap_s, _ in looks:
        now, rounds = now + gap_s, rounds + 1
        assert not watch.look(rounds, now)


async def test_the_file_is_touched_while_the_loop_lives_and_no_more(tmp_path: Path) -> None:
    path, looks, alive = tmp_path / "alive", asyncio.Semaphore(0), True

    def looked() -> bool:
        looks.release()
        return alive

    keeping = asyncio.create_task(keep_touching(SignFile("alive_file", str(path)), looked))
    for _ in range(2):
        await looks.acquire()
    assert path.exists()
    alive = False
    for _ in range(2):  # the look under way has finished
        await looks.acquire()
    path.unlink()
    for _ in range(2):
        await looks.acquire()
    assert not path.exists()
    keeping.cancel()
