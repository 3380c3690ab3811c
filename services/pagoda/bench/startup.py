"""`pagoda bench startup`: the time from the command `pagoda serve` to the first token, repeated, and where it goes.

The parts come from the server's own log. The baseline is the time it takes merely to read the weight files, measured
before each start; both find the files in the page cache, unless `--cold` drops them from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from pagoda.bench.load import LoadClient
from pagoda.bench.workload import BodyMaker, WorkloadRow
from pagoda.processes.supervisor import python_command
from pagoda.settings.flags import add_model_argument, add_options, given_flags
from pagoda.settings.numbers import number, whole
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import argument
from pagoda.tools import checkpoints
from pagoda.tools.asking import first_model
from pagoda.tools.http_stream import HttpError, Target
from pagoda_proto.model_files.gguf import part_paths

READ_BYTES = 8 * 2**20
STOP_TIMEOUT_S = 60.0
LAST_WORDS = 30  # last lines of a failed server to show
READY = re.compile(r"Pagoda serves .* at (\S+) \(ready in")
# Each milestone is reached when a message that contains its text is logged; in chronological order.
MILESTONES = {
    "imports": "kernels: ",
    "weights": "weights read and packed",
    "first_step": "first step computed",
    "registration": "registered as epoch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--runs", type=whole(1), default=3, help="starts [%(default)s]")
    group.add_argument("--cold", action="store_true", help="drop the weight files from the page cache before each")
    group.add_argument("--input-len", type=whole(1), default=16, help="tokens of the first prompt [%(default)s]")
    group.add_argument("--timeout-s", type=number(), default=600.0, help="limit for one start [%(default)s]")
    group.add_argument("--json", type=Path, help="write the report to this file")
    add_options(parser, "serve")


def main(arguments: argparse.Namespace) -> int:
    options = given_flags(arguments, "serve")
    path = checkpoints.locate(options.get("model", ""), options.get("revision", ""))
    weights = (part_paths(path) or [path]) if path.is_file() else sorted(path.glob("*.safetensors"))
    runs = [one_start(arguments, options, weights) for _ in range(arguments.runs)]
    report = {"model": options.get("model", ""), "cold": arguments.cold, "runs": runs} | medians(runs)
    report["weight_bytes"] = sum(path.stat().st_size for path in weights)
    Console(highlight=False, soft_wrap=True).print(table(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def one_start(arguments: argparse.Namespace, options: dict[str, Any], weights: Sequence[Path]) -> dict[str, Any]:
    """The times of one start, in seconds.

    Raises:
        ConfigError: the server did not become ready, or did not answer.
    """
    if arguments.cold:
        drop_from_cache(weights)
    read_s = read_files_s(weights)
    if arguments.cold:
        drop_from_cache(weights)
    with Server(serve_command(options), arguments.timeout_s) as server:
        ready_s = server.wait_until_ready()
        try:
            first_s = asyncio.run(first_token_s(server, arguments.input_len, arguments.timeout_s))
        except HttpError as error:
            raise ConfigError([f"the first request failed: {error}"]) from error
    return {"ready_s": ready_s, "first_token_s": first_s, "read_s": read_s, "parts_s": parts(server.said, ready_s)}


def serve_command(options: dict[str, Any]) -> list[str]:
    """`pagoda serve` with these options, on a free port unless one is given, with a JSON log."""
    given = {"port": 0} | options | {"log_json": True}
    return python_command("serve", *(argument(name, value) for name, value in given.items()))


@dataclass
class Server:
    """`pagoda serve` as a process; `said` holds its output as (seconds since the command, line)."""

    command: list[str]
    timeout_s: float
    url: str = ""
    started: float = 0.0
    said: list[tuple[float, str]] = field(default_factory=list)

    def __enter__(self) -> Server:
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._lines.put((time.perf_counter() - self.started, line.rstrip()))
        self._lines.put(None)

    def wait_until_ready(self) -> float:
        """Seconds from the command to its announcement. Raises ConfigError if the server ends or is too slow."""
        while True:
            left = self.started + self.timeout_s - time.perf_counter()
            try:
                said = self._lines.get(timeout=max(0.0, left))
            except queue.Empty:
                raise ConfigError([f"the server was not ready within {self.timeout_s:g} s"]) from None
            if said is None:
                last = "\n".join(line for _, line in self.said[-LAST_WORDS:])
                raise ConfigError([f"the server exited before it was ready:\n{last}"])
            self.said.append(said)
            if found := READY.search(said[1]):
                self.url = found[1]
                return said[0]


async def first_token_s(server: Server, input_len: int, timeout_s: float) -> float:
    """Seconds from the command to the first token of the first request, which is sent at once. Raises HttpError."""
    target = Target(server.url)
    bodies = BodyMaker(model=await first_model(target, timeout_s), token_ids=range(100, 250))
    client = LoadClient(target, bodies, timeout_s)
    timing = (await client.send(0, WorkloadRow(prompt_tokens=input_len, output_tokens=1))).timing
    client.close()
    if timing.error is not None or timing.first is None:
        raise HttpError(timing.error or "the answer has no token")
    return timing.first - server.started


def parts(said: Sequence[tuple[float, str]], ready_s: float) -> dict[str, float]:
    """Seconds from each milestone to the next; one that was not logged counts as part of the next."""
    found, before = {}, 0.0
    for name, text in MILESTONES.items():
        at = next((at for at, line in said if text in line and before <= at <= ready_s), None)
        if at is not None:
            found[name], before = at - before, at
    return found | {"readiness": ready_s - before}


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Ask the kernel to drop these files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files_s(paths: Sequence[Path]) -> float:
    """Seconds to read these files sequentially, one after the other, and do nothing with them."""
    buffer = bytearray(READ_BYTES)
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of every time, including those parts that every run has."""
    names = [name for name in runs[0]["parts_s"] if all(name in run["parts_s"] for run in runs)]
    return {
        **{name: statistics.median(run[name] for run in runs) for name in ("ready_s", "first_token_s", "read_s")},
        "parts_s": {name: statistics.median(run["parts_s"][name] for run in runs) for name in names},
    }


def table(report: dict[str, Any]) -> Table:
    found = Table("seconds", *(f"run {number + 1}" for number in range(len(report["runs"]))), "median")
    for column in found.columns[1:]:
        column.justify = "right"
    rows = [("command to ready", "ready_s"), ("command to first token", "first_token_s")]
    rows.append((f"only reading the {report['weight_bytes'] / 2**20:.0f} MiB of weights", "read_s"))
    for text, name in rows:
        found.add_row(text, *(f"{run[name]:.2f}" for run in report["runs"]), f"{report[name]:.2f}")
    for name, value in report["parts_s"].items():
        found.add_row(f"  of it {name.replace('_', ' ')}", *(f"{run['parts_s'][name]:.2f}" for run in report["runs"]),
                      f"{value:.2f}")  # fmt: skip
    return found
