"""Each tier started by itself, as in containers: one process per command line, with a log of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.sides import free_port

TIMEOUT_S = 240.0  # for any condition; long enough for a busy machine
STOP_S = 40.0


def pagoda(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "pagoda.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def healthy(*target: str) -> bool:
    return pagoda("ping", *target).returncode == 0


class Tiers:
    """Processes by name, and free ports for them to meet on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # the latest of each name
        self._started: list[subprocess.Popen[bytes]] = []
        self.grpc, self.zmq, self.http = (free_port() for _ in range(3))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def start(self, name: str, *arguments: str, program: str = "pagoda.cli") -> subprocess.Popen[bytes]:
        """Start a process; `program` is the module that gets the arguments."""
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", program, *arguments], stdout=log, stderr=subprocess.STDOUT
            )
        self.processes[name] = process
        self._started.append(process)
        return process

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.1)

    def _logs(self) -> dict[str, str]:
        return {path.name: path.read_text()[-1500:] for path in self.directory.glob("*.log")}

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()


@contextlib.contextmanager
def tiers_apart(directory: Path) -> Iterator[Tiers]:
    tiers = Tiers(directory)
    try:
        yield tiers
    finally:
        tiers.stop()
