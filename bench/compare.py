#!/usr/bin/env python3
"""Two OpenAI-compatible servers side by side: start both, alternate the same workloads between them, print ratios.

    python bench/compare.py --rounds 3 --out result.json \
        --a 'pagoda serve MODEL --port 8101 --served-model-name m' --a-url http://127.0.0.1:8101 \
        --b 'vllm serve MODEL --served-model-name m --dtype bfloat16 --port 8102' --b-url http://127.0.0.1:8102

A machine's speed drifts, so a figure of one side means little alone. Each round runs every workload on A and on B, one
right after the other and in turn first; what counts is the median over rounds of A/B. Start-up is the time from the
command to the first 200 of /health (/health/ready where there is one), measured one server after the other. The
workloads send random token ids, fixed lengths, greedy, and ignore the end of sequence; prompts differ between rounds,
so no prefix cache helps either side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# name: (clients, requests, prompt tokens, output tokens)
WORKLOADS = {
    "decode-1": (1, 2, 32, 128),
    "served-1": (1, 3, 256, 128),
    "served-8": (8, 16, 256, 128),
    "served-16": (16, 32, 256, 64),
    "served-32": (32, 32, 256, 128),
    "prefill-2048": (1, 2, 2048, 1),
}


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


@contextlib.contextmanager
def server(command: str, url: str, log: Path, timeout_s: float) -> Iterator[float]:
    """Run a server; yields the seconds it took to be ready."""
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() - started > timeout_s:
                raise SystemExit(f"{command!r} is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield time.monotonic() - started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(url: str, workload: str, salt: str) -> dict[str, Any]:
    clients, requests, input_len, output_len = WORKLOADS[workload]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pagoda.cli", "bench", "serve", "--base-url", url, "--json", report.name]
        command += ["--concurrency", str(clients), "--num-requests", str(requests), "--salt", salt]
        command += ["--input-len", str(input_len), "--output-len", str(output_len), "--warmup", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(report.name).read_text())
    if result["errors"] or result["wrong_output_length"]:
        raise SystemExit(f"{url} {workload}: {result['errors']}, {result['wrong_output_length']} of wrong length")
    return result


def figure(workload: str, result: dict[str, Any]) -> float:
    """The number a workload is about; higher is better."""
    if workload.startswith("decode"):
        return 1000 / float(result["tpot_ms"]["p50"])
    if workload.startswith("prefill"):
        return 1000 / float(result["ttft_ms"]["p50"])
    return float(result["output_tokens_per_s"])


def run_rounds(urls: dict[str, str], names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    figures: dict[str, dict[str, list[float]]] = {name: {"a": [], "b": []} for name in names}
    for number in range(rounds):
        for name in names:
            for side in ("ab", "ba")[number % 2]:
                value = figure(name, measure(urls[side], name, f"{number}"))
                figures[name][side].append(value)
                print(f"round {number + 1} {name:14} {side}: {value:10.2f}", flush=True)
    return figures


def show(figures: dict[str, dict[str, list[float]]], startup: dict[str, float]) -> None:
    print(f"\n{'workload':14} {'A':>10} {'B':>10} {'A/B':>7}   spread of A/B")
    for name, sides in figures.items():
        ratios = [a / b for a, b in zip(sides["a"], sides["b"], strict=True)]
        a, b = statistics.median(sides["a"]), statistics.median(sides["b"])
        print(
            f"{name:14} {a:10.2f} {b:10.2f} {statistics.median(ratios):7.2f}   {min(ratios):.2f} .. {max(ratios):.2f}"
        )
    print(f"{'start-up s':14} {startup['a']:10.2f} {startup['b']:10.2f} {startup['a'] / startup['b']:7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for side in "ab":
        parser.add_argument(f"--{side}", required=True, help=f"command of server {side.upper()}")
        parser.add_argument(f"--{side}-url", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default="decode-1,served-8,served-32", help="of " + ", ".join(WORKLOADS))
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for a server to become ready")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    urls = {"a": arguments.a_url, "b": arguments.b_url}
    logs = Path(tempfile.mkdtemp(prefix="pagoda-compare-"))
    with (
        server(arguments.b, urls["b"], logs / "b.log", arguments.timeout_s) as b_ready,
        server(arguments.a, urls["a"], logs / "a.log", arguments.timeout_s) as a_ready,
    ):
        startup = {"a": a_ready, "b": b_ready}
        figures = run_rounds(urls, arguments.workloads.split(","), arguments.rounds)
    show(figures, startup)
    if arguments.out:
        arguments.out.write_text(json.dumps({"figures": figures, "startup_s": startup}, indent=1))


if __name__ == "__main__":
    main()
