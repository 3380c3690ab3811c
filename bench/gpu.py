#!/usr/bin/env python3
"""Measures, on the GPU at hand and in under ten minutes, everything that is claimed about the GPU worker.

    python bench/gpu.py --json gpu.json
    python bench/gpu.py --sections decode,steps --minutes 4
    python bench/gpu.py --device cpu --smoke          # every path of it, on a machine without a GPU

Needs torch, triton, transformers, msgspec and a checkout of this repository; nothing is built or downloaded, and
weights are random numbers made on the device. Each section is a separate process: one that fails, hangs or corrupts the
device's context does not affect the others, and its earlier output is kept. A section's unused time goes to those after
it. The table at the end compares each figure with a ceiling measured in the same run, or with its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT),
    *(str(ROOT / name) for name in ("proto", "engine_core", "worker")),
]

from bench.device.report import MISSED, Line, heard, table, talk  # noqa: E402 - found by what stands above, before what is installed

# In order of importance; the numbers are the sections' shares of the time.
SECTIONS = {
    "ceilings": 20, "tokens": 45, "suite": 90, "decode": 45, "prefill": 20, "steps": 130, "busy": 35, "served": 105,
    "start": 80, "peer": 50,
}  # fmt: skip
SMOKE_MINUTES = 40.0  # long, because a busy machine is not a failure
INTERPRETED = ("tokens", "decode", "steps")  # in a smoke test on a CPU; the other sections use torch's kernels there
KILL_AFTER_S = 5.0


def section(name: str) -> Callable[[Any], None]:
    """The function that a section runs; only the section's own process imports it."""
    from bench.device import attention, ceilings, correctness, peer, serving, steps

    return {
        "ceilings": ceilings.run,
        "tokens": correctness.tokens,
        "suite": correctness.suite,
        "decode": attention.decode,
        "prefill": attention.prefill,
        "steps": steps.run,
        "busy": steps.watch,
        "served": serving.throughput,
        "start": serving.start,
        "peer": peer.run,
    }[name]


def run_here(arguments: argparse.Namespace) -> int:
    """Run one section, in the process started for it."""
    if arguments.device == "cpu":
        _interpret()
    from bench.device.hardware import hardware_of
    from bench.device.job import Job

    given = ("smoke", "kernels", "block_size", "copy", "flops", "until")
    hardware = hardware_of(arguments.device)
    section(arguments.run)(Job(hardware, **{name: getattr(arguments, name) for name in given}))
    return 0


def _interpret() -> None:
    """Run Triton's kernels in its interpreter, as the tests do."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
    import numpy as np
    from tests.worker.kernels.triton.interpreter import mend

    mend()
    np.seterr(all="ignore")


class Section:
    """A section's process and its output."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name = name
        self.lines: list[Line] = []
        self._started = time.monotonic()
        command = [sys.executable, str(Path(__file__).resolve()), "--run", name, *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = heard(text)
            if line is None:
                sys.stderr.write(text)
                continue
            self.lines.append(line)
            print(table({self.name: self._data("so far", "", [line])}).splitlines()[-1], flush=True)

    def _data(self, state: str, reason: str, lines: Sequence[Line]) -> dict[str, Any]:
        seconds = time.monotonic() - self._started
        return {"state": state, "reason": reason, "seconds": seconds, "lines": [line.as_data() for line in lines]}

    def finish(self, within_s: float) -> dict[str, Any]:
        """Its lines, and how it ended; stops it when its time is over."""
        try:
            code = self._process.wait(within_s)
            state, reason = ("finished", "") if code == 0 else ("failed", f"its process ended with {code}")
        except subprocess.TimeoutExpired:
            state, reason = "failed", f"out of its {within_s:.0f} s"
        finally:
            self._end()
        nothing = [line.what for line in self.lines if line.value is None]
        if state == "finished" and (nothing or not self.lines):
            state, reason = "failed", f"no figure of {len(nothing)} lines" if nothing else "it said nothing"
        return self._data(state, reason, self.lines)

    def _end(self) -> None:
        """Stop the process and everything it started."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, how)
                self._process.wait(KILL_AFTER_S)
        self._reader.join(KILL_AFTER_S)


def run_all(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run sections one after another, each with its share of the remaining time."""
    deadline = time.monotonic() + 60 * arguments.minutes
    ceilings = {"copy": 0.0, "flops": 0.0}
    for index, name in enumerate(names):
        left = deadline - time.monotonic()
        within_s = left * SECTIONS[name] / sum(SECTIONS[later] for later in names[index:])
        if left < 1:
            yield name, {"state": "not run", "reason": "no time was left", "seconds": 0.0, "lines": []}
            continue
        talk(f"\n== {name}: at most {within_s:.0f} s")
        found = Section(name, _words(arguments, name, ceilings, within_s)).finish(within_s)
        if name == "ceilings":
            for key, unit, scale in (("copy", "GB/s", 1e9), ("flops", "TFLOP/s", 1e12)):
                measured = [line["value"] for line in found["lines"] if line["unit"] == unit]
                ceilings[key] = scale * measured[0] if measured else 0.0
        yield name, found


def _words(arguments: argparse.Namespace, name: str, ceilings: dict[str, float], within_s: float) -> list[str]:
    usual = "auto" if arguments.device != "cpu" else "triton" if name in INTERPRETED else "torch"
    words = {
        "--device": arguments.device, "--kernels": arguments.kernels or usual, "--block-size": arguments.block_size,
        "--until": time.monotonic() + within_s, "--copy": ceilings["copy"], "--flops": ceilings["flops"],
    }  # fmt: skip
    return [*(str(word) for pair in words.items() for word in pair), *(["--smoke"] if arguments.smoke else [])]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="in any order, run in this one [%(default)s]")
    parser.add_argument("--minutes", type=float, help="for all sections together [9]")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything to this file")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu [%(default)s]")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it works, not how fast")
    parser.add_argument("--kernels", default="", help="as of a worker [auto]")
    parser.add_argument("--block-size", type=int, default=64, help="tokens per KV block [%(default)s]")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    for hidden in ("until", "copy", "flops"):
        parser.add_argument(f"--{hidden}", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    unknown = set(arguments.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no such sections: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if arguments.device == "cpu" and not arguments.smoke:
        parser.error("--device cpu goes with --smoke: Triton's interpreter is no measure of anything")
    arguments.minutes = arguments.minutes or (SMOKE_MINUTES if arguments.smoke else 9.0)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """0 if every section finished and every bar was met."""
    arguments = parse(words)
    if arguments.run:
        return run_here(arguments)
    asked = set(arguments.sections.split(","))
    names = [name for name in SECTIONS if name in asked or name == "ceilings"]
    sections: dict[str, dict[str, Any]] = {}
    known = facts(arguments)
    for name, found in run_all(arguments, names):
        sections[name] = found
        if arguments.json:  # after every section, in case this process is killed, too
            arguments.json.write_text(json.dumps(known | {"sections": sections}, indent=1), encoding="utf-8")
    print("\n" + table(sections))
    lines = [line for found in sections.values() for line in found["lines"]]
    well = all(found["state"] == "finished" for found in sections.values())
    return 0 if well and not any(line["verdict"] == MISSED for line in lines) else 1


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """The conditions under which figures were measured."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    asked = {name: getattr(arguments, name) for name in ("device", "smoke", "kernels", "block_size", "minutes")}
    return {"versions": versions, "python": sys.version.split()[0], "commit": commit.strip(), **asked}


if __name__ == "__main__":
    sys.exit(main())
