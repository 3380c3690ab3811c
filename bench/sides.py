"""The servers that `compare.py` compares: how each is started, paused and stopped."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.workloads import Workload

from pagoda.bench.processes import family, usage

NAME = "m"  # every server's name for the model
LLAMA_SLOT_TOKENS = 256  # a slot's size is a multiple of this many tokens
PAGODA_ENVIRONMENT = "PAGODA_"


@dataclass(frozen=True)
class Side:
    """One server. `command` returns its command line for a port and the next workload.

    `each_time`: it is started for every load and stopped after it, because it is sized for one. `pausable`: it is
    paused by SIGSTOP while another side is measured; a server that watches itself would take that for a failure.
    """

    name: str
    command: Callable[[int, Workload], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    each_time: bool = False
    pausable: bool = False


@dataclass(frozen=True)
class Model:
    """The model that Pagoda and vLLM serve, and the size of the KV cache."""

    path: str
    max_len: int
    kv_gib: float


def pagoda(name: str, model: Model, flags: str) -> Side:
    def command(port: int, workload: Workload) -> list[str]:
        return [
            sys.executable, "-m", "pagoda.cli", "serve", model.path, "--port", str(port), "--served-model-name", NAME,
            "--max-model-len", str(model.max_len), "--kv-cache-gib", f"{model.kv_gib:g}", *shlex.split(flags),
        ]  # fmt: skip

    return Side(name, command)


def vllm(name: str, python: str, model: Model, cpus: list[int] | None) -> Side:
    """vLLM's CPU build, as installed, or with its threads bound to these cores."""

    def command(port: int, workload: Workload) -> list[str]:
        return [
            python, "-m", "vllm.entrypoints.cli.main", "serve", model.path, "--served-model-name", NAME,
            "--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", str(model.max_len),
            "--no-enable-log-requests",
        ]  # fmt: skip

    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(model.kv_gib)))}
    if cpus is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cpu_list(cpus)
    return Side(name, command, environment, pausable=True)


def llama(name: str, server: str, gguf: str, threads: int, flags: str) -> Side:
    """llama.cpp's server with one slot per client."""

    def command(port: int, workload: Workload) -> list[str]:
        slot = -(-(workload.tokens_per_client + 1) // LLAMA_SLOT_TOKENS) * LLAMA_SLOT_TOKENS
        return [
            server, "-m", gguf, "-t", str(threads), "-np", str(workload.clients), "-c", str(workload.clients * slot),
            "--threads-http", str(workload.clients + 8), "--host", "127.0.0.1", "--port", str(port),
            *shlex.split(flags),
        ]  # fmt: skip

    return Side(name, command, each_time=True)


def cpu_list(cpus: list[int]) -> str:
    """[0, 1, 2, 5] -> 0-2,5"""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


class NotReady(SystemExit):
    """A server ended or took too long to start; the message is the end of its log."""


@dataclass
class Running:
    """A started server; `startup_s` is the time from its command to the first successful health check."""

    side: Side
    url: str
    process: subprocess.Popen[bytes]
    startup_s: float = 0.0

    def pids(self) -> list[int]:
        return family([self.process.pid])

    def cpu_s(self) -> float:
        """Processor seconds used by it and everything it started."""
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += usage(pid)[0]
        return total

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: int) -> None:
        if self.side.pausable:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)


@contextlib.contextmanager
def running(side: Side, workload: Workload, log: Path, timeout_s: float) -> Iterator[Running]:
    """Start a server and wait until it is ready; leaves no process behind."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PAGODA_ENVIRONMENT)}
    started = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            side.command(port, workload), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, env=clean | side.environment,
        )  # fmt: skip
    found = Running(side, f"http://127.0.0.1:{port}", process)
    try:
        while not is_ready(found.url):
            if process.poll() is not None or time.monotonic() - started > timeout_s:
                raise NotReady(f"{side.name} is not ready:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)
        found.startup_s = time.monotonic() - started
        yield found
    finally:
        stop(found)


def stop(server: Running) -> None:
    """Ask it to stop, then kill what is left of it."""
    server.go_on()
    pids = server.pids()
    with contextlib.suppress(ProcessLookupError):
        server.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(40)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    while any(map(lives, pids)):  # killed processes that are not our children end a little later
        time.sleep(0.01)


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def is_ready(url: str) -> bool:
    for path in ("/health/ready", "/health"):
        try:
            with urllib.request.urlopen(url + path, timeout=2) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
