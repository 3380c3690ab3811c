"""What every process does around its work."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from shutil import which

import pytest
from tests.services.processes.terminal import AT_A_TERMINAL

from pagoda.processes.machine import cpu_flags, cpu_quota, memory_info, memory_limit
from pagoda.processes.process import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_OK,
    EXIT_UNREACHABLE,
    MANY_FILES,
    StatusPipe,
    beating,
    exit_code,
    fast_loop,
    run_guarded,
)
from pagoda.settings.problems import ConfigError
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

IN_USE = OSError(errno.EADDRINUSE, "in use")


@pytest.mark.parametrize(
    ("error", "at_start", "later"),
    [
        (ConfigError(["port"]), EXIT_CONFIG, EXIT_CONFIG),
        (ValueError("bad address"), EXIT_CONFIG, EXIT_CRASH),
        (IN_USE, EXIT_CONFIG, EXIT_CRASH),
        (FileNotFoundError("no model"), EXIT_CONFIG, EXIT_CRASH),
        (ConnectionRefusedError("nobody"), EXIT_UNREACHABLE, EXIT_CRASH),
        (TimeoutError("late"), EXIT_UNREACHABLE, EXIT_CRASH),
        (PagodaError(ErrorCode.UNAVAILABLE, "refused"), EXIT_UNREACHABLE, EXIT_UNREACHABLE),
        (PagodaError(ErrorCode.MODEL_NOT_FOUND, "none"), EXIT_CONFIG, EXIT_CONFIG),
        (RuntimeError("bug"), EXIT_CRASH, EXIT_CRASH),
    ],
)
def test_an_exit_code_says_whether_starting_again_may_help(error: Exception, at_start: int, later: int) -> None:
    assert (exit_code(error, up=False), exit_code(error, up=True)) == (at_start, later)


def fail(error: Exception) -> int:
    def run() -> None:
        raise error

    return run_guarded(run, StatusPipe(-1))


def test_what_an_operator_can_mend_is_told_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert fail(ConfigError(["one", "two"])) == EXIT_CONFIG
    assert [record.message for record in caplog.records] == ["one", "two"]
    assert all(record.exc_info is None for record in caplog.records)


def test_a_bug_is_told_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert fail(RuntimeError("bug")) == EXIT_CRASH
    assert caplog.records[-1].exc_info is not None
    assert run_guarded(lambda: None, StatusPipe(-1)) == EXIT_OK


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConfigError(["one", "two"]), "one; two"),
        (RuntimeError(), "RuntimeError"),
        (ValueError("x" * 9999), "x" * 1000 + " .."),
    ],
)
def test_why_a_process_failed_is_told_to_its_supervisor_in_one_line(error: Exception, why: str) -> None:
    read, write = os.pipe()

    def run() -> None:
        raise error

    run_guarded(run, StatusPipe(write))
    assert json.loads(os.read(read, 1 << 16)) == {"event": "failed", "why": why}
    os.close(read)
    os.close(write)


def test_events_are_lines_of_json_and_a_full_pipe_loses_them_rather_than_wait() -> None:
    read, write = os.pipe()
    report = StatusPipe(write)
    report({"event": "loading", "bytes": 1})
    assert not report.up
    for _ in range(5000):
        report({"event": "ready", "padding": "x" * 100})
    assert report.up
    lines = os.read(read, 1 << 20).split(b"\n")
    assert json.loads(lines[0]) == {"event": "loading", "bytes": 1}
    os.close(read)
    report({"event": "nobody listens"})
    os.close(write)


STARTING = """
import gc, json
from pagoda.processes.process import StatusPipe

report = StatusPipe(-1)
counts = [gc.get_freeze_count()]
for event in ("loading", "loaded", "ready"):
    report({"event": event})
    counts.append(gc.get_freeze_count())
    kept = [[] for _ in range(100)]
print(json.dumps(counts))
"""


def test_collections_of_garbage_leave_out_what_was_there_when_a_process_began_to_work() -> None:
    told = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True, check=True).stdout
    begun, loading, loaded, ready = json.loads(told)
    assert loading <= begun
    assert 10_000 < ready <= loaded


IMPORTING = """
import gc, json
from pagoda.cli import parser_of
from pagoda.processes import tier

gc.collect()
words = ["engine-core", "--listen=unix:/x", "--worker-endpoint=ipc:///x"]
tier.begin("engine-core", parser_of("engine-core").parse_args(words))
begun = [generation["collections"] for generation in gc.get_stats()]
import pagoda_engine_core.server
print(json.dumps([begun, [generation["collections"] for generation in gc.get_stats()]]))
"""


def test_garbage_is_not_looked_for_in_what_a_start_imports() -> None:
    told = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True).stdout
    begun, imported = json.loads(told)
    assert imported == begun


PROGRAM = """
import asyncio, sys, threading
from pagoda.processes.process import StatusPipe, run_async, run_blocking

async def serve(stop):
    print("up", flush=True)
    await stop.wait()
    if "deaf" in sys.argv:
        await asyncio.sleep(600)

def run(stop):
    print("up", flush=True)
    while not stop.wait(0.05) or "deaf" in sys.argv:
        pass

report = StatusPipe(-1)
sys.exit(run_async(serve, report) if "async" in sys.argv else run_blocking(run, report))
"""


@pytest.mark.parametrize("kind", ["async", "blocking"])
@pytest.mark.parametrize("words", [[], ["deaf"]])
def test_the_first_signal_asks_and_the_second_one_ends(kind: str, words: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, kind, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        while words and process.poll() is None:  # signals of one kind merge until the first has been taken
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        assert process.wait(timeout=240) == (EXIT_CRASH if words else EXIT_OK)


@pytest.mark.parametrize("kind", ["async", "blocking"])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_it_unless_nohup_says_otherwise(kind: str, ignored: bool) -> None:
    command = [*AT_A_TERMINAL, *([which("nohup") or "nohup"] if ignored else []), sys.executable, "-c", PROGRAM, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        if ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == EXIT_OK


def test_the_event_loop_is_uvloops_where_installed() -> None:
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        assert type(runner.get_loop()).__module__.startswith("uvloop")


BEATING = """
import asyncio, os, sys, threading, time
from pagoda.processes.process import StatusPipe, run_async, run_blocking

def stay():
    print("stuck", flush=True)
    sys.stdin.readline()

async def serve(stop):
    await asyncio.sleep(0.1)
    stay()

report = StatusPipe(int(sys.argv[2]))
sys.exit(run_async(serve, report) if sys.argv[1] == "async" else run_blocking(lambda stop: stay(), report))
"""


@pytest.mark.parametrize(("kind", "beats"), [("async", False), ("blocking", True)])
def test_a_beat_says_that_the_event_loop_comes_round_or_that_a_process_is_not_frozen(kind: str, beats: bool) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", BEATING, kind, str(write)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(write,), text=True
    ) as process:
        os.close(write)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        if beats:  # the beating thread continues
            for _ in range(2):
                assert b'"beat"' in os.read(read, 4096)
        else:  # only the beat from before it got stuck
            time.sleep(3 * times.CHILD_BEAT_S)
            assert os.read(read, 4096).count(b'"beat"') == 1
        process.stdin.close()
        process.wait(60)
    os.close(read)


def test_what_beat_beside_something_has_ended_with_it() -> None:
    before = threading.active_count()
    with beating(StatusPipe(os.open(os.devnull, os.O_WRONLY))):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_the_limits_of_a_control_group_are_read(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert cpu_quota(tmp_path) == 1.5
    assert memory_limit(tmp_path) == 1024**3


def test_the_limits_of_an_older_control_group_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cpu_quota(tmp_path) == 0.5
    assert memory_limit(tmp_path) is None


def test_facts_of_the_machine_are_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:   1000 kB\nMemAvailable:  10 kB\nHugePages_Total: 0\n")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 fma\n")
    assert memory_info(tmp_path / "meminfo")["MemAvailable"] == 10 * 1024
    assert cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert memory_info(tmp_path / "none") == {}
    assert cpu_flags(tmp_path / "none") == set()


BEGUN = """
import resource
from pagoda.cli import parser_of
from pagoda.processes import tier
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
arguments = parser_of("engine-core").parse_args(["engine-core", "--listen", "unix:/e", "--worker-endpoint", "ipc:///w"])
tier.begin("engine-core", arguments)
print(*resource.getrlimit(resource.RLIMIT_NOFILE), hard)
"""


def test_a_tier_may_open_as_many_files_as_its_system_lets_it() -> None:
    done = subprocess.run([sys.executable, "-c", BEGUN], capture_output=True, check=True, text=True)
    soft, hard, hard_before = map(int, done.stdout.split())
    assert hard == hard_before
    assert soft == (MANY_FILES if hard < 0 else min(hard, MANY_FILES))
