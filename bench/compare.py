#!/usr/bin/env python3
"""Compares servers on one machine: alternates the same workloads between them, prints figures and ratios.

    python bench/compare.py MODEL --rounds 3 --out result.json \
        --vllm /path/to/venv/bin/python \
        --llama-server /path/to/llama-server --gguf bf16=model-bf16.gguf --gguf Q8_0=model-q8_0.gguf
    python bench/compare.py MODEL --pagoda 'pagoda=' --pagoda 'int8=--quantization int8' --workloads decode-1,served-16

A machine's speed drifts, so one side's figure alone means little. Each round runs every workload on all sides, one
right after the other, with a different side first each round; what counts is the median over rounds of first side /
other side. All get the same token ids and lengths, greedy unless the workload says otherwise, and ignore the end of
sequence; prompts differ between rounds and workloads, so no prefix cache helps. Only the side whose turn it is
computes: vLLM is stopped by a signal meanwhile, llama-server is started for each load, and Pagoda idles, the cost of
which is measured. `pagoda bench kernels` measures the machine's ceilings before the first round and after each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.sides import NAME, Running, Side
from bench.workloads import (
    COPY,
    DEFAULT,
    WORKLOADS,
    Figures,
    Workload,
    parse_workloads,
    ratios_to_first,
    ratios_within,
    turns,
)

from bench import sides as peers

Servers = dict[str, Running]
CLI = (sys.executable, "-m", "pagoda.cli")


class Comparison:
    """The servers of one run. Servers that are not started for each load are up from `__enter__` on."""

    def __init__(self, sides: Sequence[Side], logs: Path, timeout_s: float) -> None:
        self.sides = {side.name: side for side in sides}
        self.startup_s: dict[str, list[float]] = {name: [] for name in self.sides}
        self._logs = logs
        self._timeout_s = timeout_s
        self._up: Servers = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Comparison:
        with contextlib.ExitStack() as stack:
            for side in self.sides.values():
                if not side.each_time:
                    server = stack.enter_context(self._start(side, WORKLOADS["served-1"]))
                    self._up[side.name] = server
                    server.pause()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def serving(self, name: str, workload: Workload) -> Iterator[Running]:
        """The side's server, ready for this workload, while the other sides are inactive."""
        if self.sides[name].each_time:
            with self._start(self.sides[name], workload) as server:
                yield server
            return
        server = self._up[name]
        server.go_on()
        try:
            yield server
        finally:
            server.pause()

    def idle_cpu_s(self, seconds: float) -> dict[str, float]:
        """Processor seconds that each side's processes use in `seconds` without requests, all at the same time."""
        with contextlib.ExitStack() as stack:
            servers = {name: stack.enter_context(self.serving(name, WORKLOADS["served-1"])) for name in self.sides}
            time.sleep(2)  # let work left from a start or a stop finish
            before = {name: server.cpu_s() for name, server in servers.items()}
            time.sleep(seconds)
            return {name: server.cpu_s() - before[name] for name, server in servers.items()}

    @contextlib.contextmanager
    def _start(self, side: Side, workload: Workload) -> Iterator[Running]:
        log = self._logs / f"{side.name.replace(' ', '-')}.log"
        with peers.running(side, workload, log, self._timeout_s) as server:
            self.startup_s[side.name].append(server.startup_s)
            yield server


def measure(url: str, workload: Workload, salt: str, rows: Path | None) -> float:
    if workload.primed:
        load(url, workload, salt, rows)
    return workload.value(load(url, workload, salt, rows))


def load(url: str, workload: Workload, salt: str, rows: Path | None) -> dict[str, Any]:
    """The report of one load; the same salt means the same prompts."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [*CLI, "bench", "serve", "--base-url", url, "--model", NAME, "--json", report.name]
        done = subprocess.run([*command, *workload.flags(salt, rows)], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the load on {url} failed:\n{done.stdout}")
        result: dict[str, Any] = json.loads(Path(report.name).read_text())
    if result["wrong_output_length"] or result["wrong_prompt_length"]:
        raise SystemExit(f"{url}: answers or prompts of wrong length")
    return result


def measure_ceilings() -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [*CLI, "bench", "kernels", "--ceilings", "--json", report.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ceilings: dict[str, float] = json.loads(Path(report.name).read_text())["ceilings"][-1]
    return ceilings


def run_rounds(
    comparison: Comparison, workloads: dict[str, Workload], rounds: int, rows: dict[str, Path]
) -> tuple[Figures, list[dict[str, float]]]:
    names = list(comparison.sides)
    figures: Figures = {name: {side: [] for side in names} for name in workloads}
    ceilings = [measure_ceilings()]
    for number in range(rounds):
        for name, workload in workloads.items():
            for side in turns(names, number):
                with comparison.serving(side, workload) as server:
                    value = measure(server.url, workload, f"{number} {name}", rows.get(workload.source))
                figures[name][side].append(value)
                print(f"round {number + 1} {name:14} {side:24} {value:10.2f}", flush=True)
        ceilings.append(measure_ceilings())
    return figures, ceilings


def median_of(values: Sequence[float]) -> str:
    from statistics import median

    return f"{median(values):.2f}" if values else ""


def table(figures: Figures, startup_s: dict[str, list[float]], idle_cpu_s: dict[str, float]) -> Table:
    """A table of medians, with the ratio first / other and its spread below those of the other sides."""
    first, *others = startup_s
    found = Table("workload", "figure", first, *others)
    against = ratios_to_first(figures)
    for name, by_side in figures.items():
        cells = [f"{median_of(by_side[side])}\n{against[name][side]}" for side in others]
        found.add_row(name, WORKLOADS[name].figure, median_of(by_side[first]), *cells)
    for name, ratios in ratios_within(figures).items():
        found.add_row(f"{name} / {WORKLOADS[name].than}", "ratio", *(str(ratios[side]) for side in startup_s))
    found.add_row("start-up", "s", *(median_of(startup_s[side]) for side in startup_s))
    if idle_cpu_s:
        found.add_row("idle", "CPU s", *(f"{idle_cpu_s[side]:.2f}" for side in startup_s))
    return found


def make_sides(arguments: argparse.Namespace) -> list[Side]:
    """Raises ValueError if two sides have the same name, or a NAME= is missing."""
    model = peers.Model(arguments.model, arguments.max_model_len, arguments.kv_gib)
    cpus = sorted(os.sched_getaffinity(0))
    found = [peers.pagoda(name, model, flags) for name, flags in map(named, arguments.pagoda or ["pagoda="])]
    if arguments.vllm:
        found.append(peers.vllm("vLLM as installed", arguments.vllm, model, None))
        found.append(peers.vllm("vLLM all cores", arguments.vllm, model, cpus))
    if bool(arguments.llama_server) != bool(arguments.gguf):
        raise ValueError("--llama-server and --gguf belong together")
    for name, path in map(named, arguments.gguf or []):
        found.append(peers.llama(f"llama.cpp {name}", arguments.llama_server, path, len(cpus), arguments.llama_flags))
    names = [side.name for side in found]
    if len(set(names)) < len(names):
        raise ValueError(f"sides must have different names, got {', '.join(names)}")
    return found


def named(text: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not name or not equals:
        raise ValueError(f"NAME=.. is needed, got {text!r}")
    return name, rest


def make_copies(model: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent / "copying.py"), model, "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shares: dict[str, Any] = json.loads(done.stdout)
    print(f"copy-1: {shares['copied_share']:.0%} of the answers repeat what stands before them", flush=True)
    return shares


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a checkpoint in Hugging Face format")
    parser.add_argument("--pagoda", action="append", metavar="NAME=FLAGS", help="a Pagoda with these flags; repeatable")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter that has vLLM; adds two sides")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server")
    parser.add_argument("--gguf", action="append", metavar="NAME=PATH", help="the model for it; repeatable")
    parser.add_argument("--llama-flags", default="", help="more flags for llama-server")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--workloads", default=DEFAULT, help="of " + ", ".join(WORKLOADS) + " [%(default)s]")
    parser.add_argument("--max-model-len", type=int, default=4096, help="[%(default)s]")
    parser.add_argument("--kv-gib", type=float, default=3.0, help="memory for the KV cache of each [%(default)s]")
    parser.add_argument("--idle-s", type=float, default=20.0, help="watch them do nothing; 0: do not [%(default)s]")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for a server to become ready [%(default)s]")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse_arguments()
    try:
        workloads, sides = parse_workloads(arguments.workloads), make_sides(arguments)
    except ValueError as error:
        raise SystemExit(f"compare.py: {error}") from error
    logs = Path(tempfile.mkdtemp(prefix="pagoda-compare-"))
    rows, copies = {}, {}
    if any(workload.source == COPY for workload in workloads.values()):
        rows[COPY] = logs / "copy.jsonl"
        copies = make_copies(arguments.model, rows[COPY])
    with Comparison(sides, logs, arguments.timeout_s) as comparison:
        idle_cpu_s = comparison.idle_cpu_s(arguments.idle_s) if arguments.idle_s else {}
        figures, ceilings = run_rounds(comparison, workloads, arguments.rounds, rows)
    startup_s = comparison.startup_s
    console = Console(highlight=False)
    console.width = max(console.width, 40 + 24 * len(sides))
    console.print(table(figures, startup_s, idle_cpu_s))
    for name, unit in (("read", "GB/s"), ("bf16", "GFLOP/s"), ("int8", "GOP/s")):
        values = [one[name] / 1e9 for one in ceilings]
        console.print(f"{name} ceiling: {median_of(values)} {unit} ({min(values):.1f} .. {max(values):.1f})")
    if arguments.out:
        result = {
            "model": arguments.model, "cores": len(os.sched_getaffinity(0)), "figures": figures,
            "startup_s": startup_s, "idle_s": arguments.idle_s, "idle_cpu_s": idle_cpu_s, "ceilings": ceilings,
            "copies": copies,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
