"""The supervisor with tiny children: each test runs one in a process of its own, as an operator would.

Its promises hold for children that are started afresh and for those forked from templates.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.services.processes.supervising import STEADY, gone, supervise

from pagoda.processes.exit_codes import describe_exit

pytestmark = pytest.mark.e2e
HOW = ["forked", "afresh"]


@pytest.mark.parametrize("how", HOW)
def test_a_killed_child_is_started_again(how: str) -> None:
    with supervise(how, one=STEADY, two=STEADY) as running:
        first = running.event(child="one", event="ready")["pid"]
        os.kill(first, signal.SIGKILL)
        assert running.event(child="one", event="died")["code"] == -signal.SIGKILL
        assert running.event(child="one", event="ready")["pid"] != first


@pytest.mark.parametrize("signums", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGHUP, signal.SIGHUP)])
def test_a_signal_stops_every_child_and_exits_cleanly(signums: tuple[signal.Signals, ...]) -> None:
    """When a terminal is closed, both the shell and the kernel send SIGHUP."""
    with supervise(one=STEADY, two=STEADY) as running:
        pids = {running.event(event="ready")["pid"] for _ in range(2)}
        for signum in signums:
            running.process.send_signal(signum)
            time.sleep(0.05)
        assert running.end() == 0
        assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("how", HOW)
def test_kill_9_of_the_supervisor_leaves_no_child(how: str) -> None:
    with supervise(how, one=STEADY, deaf=["deaf", "ready", "linger"]) as running:
        pids = {running.event(event="ready")["pid"] for _ in range(2)}
        running.process.kill()
        assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("how", HOW)
def test_a_child_that_does_not_stop_is_killed_after_its_bound(how: str) -> None:
    with supervise(how, quick=["deaf", "ready", "linger"]) as running:
        pid = running.event(event="ready")["pid"]
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert gone(pid)


@pytest.mark.parametrize("how", HOW)
def test_a_second_signal_kills_at_once(how: str) -> None:
    with supervise(how, deaf=["deaf", "ready", "linger"], other=STEADY) as running:
        pids = {running.event(event="ready")["pid"] for _ in range(2)}
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 1
        assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("how", HOW)
def test_what_a_child_started_dies_with_it(tmp_path: Path, how: str) -> None:
    note = tmp_path / "pid"
    with supervise(how, one=[f"grandchild={note}", *STEADY]) as running:
        pid = running.event(event="ready")["pid"]
        os.kill(pid, signal.SIGKILL)
        running.event(event="died")
        first_grandchild = int(note.read_text())
        running.event(event="ready")
        assert gone(first_grandchild) or psutil.Process(first_grandchild).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", HOW)
def test_a_refused_configuration_is_not_tried_again(capfd: pytest.CaptureFixture[str], how: str) -> None:
    with supervise(how, good=STEADY, bad=["why=the model has no legs", "exit=2"]) as running:
        assert running.end() == 2
    assert "bad cannot start: the model has no legs\n" in capfd.readouterr().err


@pytest.mark.parametrize("how", HOW)
def test_a_child_that_only_crashes_at_start_ends_the_whole(capfd: pytest.CaptureFixture[str], how: str) -> None:
    with supervise(how, good=STEADY, bad=["exit=1"]) as running:
        assert running.end() == 1
    assert "bad died 3 times without ever becoming ready; giving up: exited with code 1\n" in capfd.readouterr().err


@pytest.mark.parametrize("how", HOW)
def test_a_crash_at_start_is_tried_again(tmp_path: Path, how: str) -> None:
    with supervise(how, one=[f"crash-once={tmp_path / 'mark'}", *STEADY]) as running:
        assert running.event(event="died")["code"] == 1
        running.event(event="ready")


@pytest.mark.parametrize("how", HOW)
def test_a_silent_child_is_killed_and_started_again(how: str) -> None:
    with supervise(how, mute=STEADY) as running:
        first = running.event(event="ready")["pid"]
        assert running.event(event="died")["code"] == -signal.SIGKILL
        assert gone(first)


def test_silence_before_a_first_word_may_take_longer() -> None:
    with supervise(mute=["wait=2.5", *STEADY]) as running:  # longer than the silence allowed, and a look
        assert running.event()["event"] == "ready"


def test_a_child_that_never_says_a_word_is_killed() -> None:
    with supervise(wordless=["linger"]) as running:
        assert running.event()["event"] == "died"


@pytest.mark.slow
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_supervisor_that_was_held_up_blames_no_child_for_it(all_of_them: bool) -> None:
    """The supervisor is stopped for twice a child's allowed silence, alone or with all, as on a suspended machine."""
    with supervise(beating_1=["ready", "beat"], beating_2=["ready", "beat"]) as running:
        children = [running.event(event="ready")["pid"] for _ in range(2)]
        stopped = [running.process.pid, *(children if all_of_them else [])]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        resumed = time.monotonic()
        for event in iter(running.event, None):
            assert event["event"] == "line"
            if float(event["line"]) > resumed + 2.5:  # it has looked at them again, more than once
                break
        assert all(psutil.pid_exists(pid) for pid in children)


@pytest.mark.slow
def test_a_supervisor_that_was_held_up_still_finds_who_is_stuck() -> None:
    with supervise(beating=["ready", "beat"]) as running:
        pid = running.event(event="ready")["pid"]
        os.kill(pid, signal.SIGSTOP)
        os.kill(running.process.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(running.process.pid, signal.SIGCONT)
        assert running.event(event="died")["code"] == -signal.SIGKILL


@pytest.mark.parametrize("how", HOW)
def test_a_child_that_is_killed_again_and_again_comes_back_every_time(how: str) -> None:
    with supervise(how, one=STEADY, two=STEADY) as running:
        for _ in range(8):  # more than may die at the start, and enough for the longest pause
            os.kill(running.event(child="one", event="ready")["pid"], signal.SIGKILL)
        running.event(child="one", event="ready")


@pytest.mark.parametrize("how", HOW)
def test_words_of_children_are_passed_on_whole(how: str) -> None:
    text = "é" * 40_000  # more bytes than one read takes
    with supervise(how, one=["say=40000", *STEADY]) as running:
        assert running.event(event="line")["line"] == text


def test_garbage_on_the_status_pipe_is_passed_over() -> None:
    with supervise(one=["garbage", *STEADY]) as running:
        running.event(event="ready")


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exited with code 0"), (-9, "was killed by SIGKILL"), (-200, "was killed by signal 200")],
)
def test_an_exit_is_described(code: int, text: str) -> None:
    assert describe_exit(code) == text
