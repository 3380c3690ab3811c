#!/usr/bin/env python3
"""The same request under everything that must not matter, through the real stack: count how often it is bit-identical.

    python bench/determinism.py [--requests 100]

Each of N requests (half greedy, half sampled, some with penalties or two choices) runs alone first. Then the same
requests run in the company of 31 others, again after their prefixes are cached, on a block pool so small that rows are
preempted, and with `kill -9` of the busiest of two workers in the middle of the streams, until N streams have lived
through the loss of their own worker. Equal means: text, tokens, log-probabilities and endings to the last bit.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.stack import Stack, kill, running_stack
from tests.e2e.test_recovery import make_request, run_all

NAME = ("--served-model-name", "demo")
COMPANY = 32
STREAMS_PER_KILL = 12


def in_groups(stack: Stack, indices: list[int], size: int) -> list[Any]:
    results: list[Any] = []
    for start in range(0, len(indices), size):
        group = [make_request(index) for index in indices[start : start + size]]
        results += asyncio.run(run_all(stack, group))
    return results


def show(condition: str, results: list[Any], alone: list[Any], note: str = "") -> bool:
    equal = sum(result == expected for result, expected in zip(results, alone, strict=True))
    print(f"{condition:44} {equal} of {len(alone)} identical{note}", flush=True)
    return equal == len(alone)


def under_kills(stack: Stack, alone: list[Any]) -> bool:
    """Kill until as many streams as there are requests have lost their worker."""
    affected = equal = ran = kills = 0
    while affected < len(alone):
        stack.wait_until(lambda: len(stack.ready_workers()) == 2)
        indices = [(ran + offset) % len(alone) for offset in range(STREAMS_PER_KILL)]
        before = stack.stats().replays

        def kill_the_busiest() -> None:
            kill(max(stack.ready_workers(), key=lambda worker: worker.num_rows).pid)

        results = asyncio.run(run_all(stack, [make_request(index) for index in indices], kill_the_busiest))
        equal += sum(result == alone[index] for result, index in zip(results, indices, strict=True))
        affected += stack.stats().replays - before
        ran += len(indices)
        kills += 1
    print(f"{'kill -9 of its worker mid-stream':44} {equal} of {ran} identical ({affected} replayed, {kills} kills)")
    return equal == ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    indices = list(range(parser.parse_args().requests))
    scratch = Path(tempfile.mkdtemp(prefix="pagoda-determinism-"))
    for name in ("pair", "tiny"):
        (scratch / name).mkdir()
    with running_stack(scratch / "pair", *NAME, workers=2) as pair:
        alone = in_groups(pair, indices, 1)
        verdicts = [
            show(f"in the company of {COMPANY - 1} others", in_groups(pair, indices, COMPANY), alone),
            show("again, after a prefix hit", in_groups(pair, indices, 1), alone),
            under_kills(pair, alone),
        ]
    with running_stack(scratch / "tiny", *NAME, "--num-blocks", "24", "--max-model-len", "512") as tiny:
        results = in_groups(tiny, indices, COMPANY)
        preemptions = tiny.stats().preemptions
        verdicts.append(show("on a tiny block pool", results, alone, f" ({preemptions} preemptions)"))
    sys.exit(0 if all(verdicts) and preemptions else 1)


if __name__ == "__main__":
    main()
