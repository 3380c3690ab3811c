"""How bench/compare.py starts its servers, and that it leaves nothing of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bench.sides import Model, NotReady, Running, Side, cpu_list, llama, pagoda, running, vllm
from bench.workloads import WORKLOADS

from bench import compare

MODEL = Model("/model", 4096, 2.5)
ANY = WORKLOADS["served-16"]
HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def healthy(**changes: bool) -> Side:
    return Side("healthy", lambda port, _: [sys.executable, "-c", HEALTHY, str(port)], **changes)


def arguments(*words: str) -> list[Side]:
    return compare.make_sides(compare.parse_arguments(["/model", *words]))


def test_the_command_of_pagoda() -> None:
    command = pagoda("p", MODEL, "--quantization int8 --name 'a b'").command(8101, ANY)
    assert command[:5] == [sys.executable, "-m", "pagoda.cli", "serve", "/model"]
    assert command[5:] == [
        "--port", "8101", "--served-model-name", "m", "--max-model-len", "4096", "--kv-cache-gib", "2.5",
        "--quantization", "int8", "--name", "a b",
    ]  # fmt: skip


def test_vllm_as_installed_and_bound_to_all_cores() -> None:
    plain, bound = (vllm("v", "/venv/bin/python", MODEL, cpus) for cpus in (None, [0, 1]))
    assert plain.command(1, ANY) == bound.command(1, ANY)
    assert plain.command(1, ANY)[0] == "/venv/bin/python"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plain.environment
    assert bound.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert plain.pausable
    assert not plain.each_time


def test_llama_has_a_slot_for_each_client_of_the_workload() -> None:
    side = llama("l", "/llama-server", "/m.gguf", 2, "--flash-attn on")
    command = side.command(8103, ANY)
    flags = dict(zip(command[1::2], command[2::2], strict=True))
    assert flags == {
        "-m": "/m.gguf", "-t": "2", "-np": "16", "-c": str(16 * 512), "--threads-http": "24", "--host": "127.0.0.1",
        "--port": "8103", "--flash-attn": "on",
    }  # fmt: skip
    assert side.each_time
    exact = llama("l", "s", "g", 1, "").command(1, WORKLOADS["long-4k"])
    assert exact[exact.index("-c") + 1] == str(4 * 4096)


@pytest.mark.parametrize(("cpus", "text"), [([0, 1], "0-1"), ([5, 0, 2, 1], "0-2,5"), ([3], "3")])
def test_cores_as_ranges(cpus: list[int], text: str) -> None:
    assert cpu_list(cpus) == text


def test_sides_from_the_command_line() -> None:
    assert [side.name for side in arguments()] == ["pagoda"]
    names = arguments("--pagoda", "a=", "--pagoda", "b=--threads 1", "--vllm", "py", "--llama-server", "s",
                      "--gguf", "Q8_0=q.gguf")  # fmt: skip
    assert [side.name for side in names] == ["a", "b", "vLLM as installed", "vLLM all cores", "llama.cpp Q8_0"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--pagoda", "a=", "--pagoda", "a="], "different names"),
        (["--pagoda", "a"], "NAME=.. is needed"),
        (["--llama-server", "s"], "belong together"),
    ],
)
def test_sides_that_make_no_sense_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        arguments(*words)


def test_a_server_is_started_timed_and_stopped_with_its_children(tmp_path: Path) -> None:
    with running(healthy(), ANY, tmp_path / "log", 60.0) as server:
        assert server.startup_s > 0
        assert server.cpu_s() > 0
        pids = server.pids()
        assert len(pids) == 2
    assert not living(pids)


def states(server: Running) -> set[str]:
    return {psutil.Process(pid).status() for pid in server.pids()}


def wait_for(server: Running, stopped: bool) -> None:
    while (states(server) == {"stopped"}) != stopped:
        time.sleep(0.01)


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_only_a_pausable_server_is_paused(tmp_path: Path) -> None:
    with running(healthy(pausable=True), ANY, tmp_path / "log", 60.0) as server:
        server.pause()
        wait_for(server, stopped=True)
        server.go_on()
        wait_for(server, stopped=False)
        server.pause()  # a paused server is stopped all the same
    with running(healthy(), ANY, tmp_path / "log", 60.0) as server:
        server.pause()
        assert "stopped" not in states(server)


def test_a_server_that_ends_or_is_too_slow_is_told_with_its_log(tmp_path: Path) -> None:
    ending = Side("x", lambda port, _: [sys.executable, "-c", "print('no such model')"])
    with pytest.raises(NotReady, match="no such model"), running(ending, ANY, tmp_path / "log", 60.0):
        pass
    slow = Side("x", lambda port, _: [sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(NotReady), running(slow, ANY, tmp_path / "log", 0.1):
        pass


def test_a_server_that_does_not_want_to_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = HEALTHY.replace(
        "import http", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import http"
    )
    side = Side("x", lambda port, _: [sys.executable, "-c", stubborn, str(port)])
    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", lambda self, limit=None: wait(self, limit and 0.1))
    with running(side, ANY, tmp_path / "log", 60.0) as server:
        pids = server.pids()
    assert server.process.returncode == -signal.SIGKILL
    assert not living(pids)


def test_our_own_variables_do_not_reach_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_PORT", "1")
    with running(healthy(), ANY, tmp_path / "log", 60.0) as server:
        environment = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    assert b"PAGODA_PORT=1" not in environment
    assert any(entry.startswith(b"PATH=") for entry in environment) == ("PATH" in os.environ)
