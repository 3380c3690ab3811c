#!/usr/bin/env python3
"""Runs the same requests under every condition that must not matter, on the real stack, and counts bit-identical ones.

    python bench/determinism.py [--requests 100] [--populations plain,formed]

Each population has N requests, greedy and sampled, some with several choices: `plain` ones are completions, some with
penalties; `formed` ones are completions and chats with structured output: a JSON schema, a regular expression, one of
several texts, a grammar, or tool calls that are required or named. Each request first runs alone. Then the same
requests run in a batch with 31 others, from all populations; again after their prefixes are cached; with `kill -9` of
the busiest of two workers, and of the engine core, during the streams, until N streams have survived the loss of their
own; without the drafts that grammars force; and on a block pool so small that rows are preempted. Identical means:
text, calls, tokens, log-probabilities and endings to the last bit. The exit status is 0 if all are.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.stack import Stack, kill, running_stack
from tests.e2e.streams import MODEL, Request, Seen, formed, plain, run_all

POPULATIONS: dict[str, Callable[[int], Request]] = {"plain": plain, "formed": formed}
NAME = ("--served-model-name", MODEL)
TINY = ("--num-blocks", "32", "--max-model-len", "800")
COMPANY = 32
AGAIN = 4  # at a time: few enough that their prefixes stay cached
STREAMS_PER_KILL = 12
SHOWN = 200

Key = tuple[str, int]  # population and number
Results = dict[Key, list[Seen]]


def in_groups(stack: Stack, keys: list[Key], size: int) -> Results:
    results: Results = {}
    for start in range(0, len(keys), size):
        group = keys[start : start + size]
        requests = [POPULATIONS[population](number) for population, number in group]
        results |= zip(group, asyncio.run(run_all(stack, requests)), strict=True)
    return results


class Verdicts:
    """Compares results with `alone`, the oracle."""

    def __init__(self, alone: Results) -> None:
        self.alone = alone
        self.good = True

    def show(self, condition: str, results: Results, note: str = "") -> None:
        for population in {population for population, _ in results}:
            keys = [key for key in results if key[0] == population]
            equal = [results[key] == self.alone[key] for key in keys]
            self.told(population, condition, equal, note)
            if not all(equal):
                self.show_difference(keys[equal.index(False)], results)

    def told(self, population: str, condition: str, equal: list[bool], note: str = "") -> None:
        print(f"{population:7} {condition:36} {sum(equal)} of {len(equal)} identical{note}", flush=True)
        self.good = self.good and all(equal)

    def show_difference(self, key: Key, results: Results) -> None:
        for one, other in zip(results[key], self.alone[key], strict=True):
            if one != other:
                pairs = zip(one.tokens, other.tokens, strict=False)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
                print(f"        {key} differs at token {same}: {str(one)[:SHOWN]}, alone {str(other)[:SHOWN]}")


def kill_the_busiest(stack: Stack) -> None:
    kill(max(stack.ready_workers(), key=lambda worker: worker.num_rows).pid)


def kill_the_engine_core(stack: Stack) -> None:
    kill(stack.children("engine-core")[0].pid)


def replayed(stack: Stack) -> int:
    """Requests replayed by the engine core because their worker was lost."""
    return stack.stats().replays


def resumed(stack: Stack) -> int:
    """Requests resumed by the gateway because their engine core was lost."""
    lines = httpx.get(f"{stack.url}/metrics", timeout=60).text.splitlines()
    return int(
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("pagoda_requests_resumed_total"))
    )


def under_kills(
    stack: Stack, keys: list[Key], verdicts: Verdicts, fatal: Callable[[Stack], None], count: Callable[[Stack], int]
) -> None:
    """Kill until as many streams as there are requests have lost the process that computed them."""
    affected = kills = 0
    equal: list[bool] = []
    while affected < len(keys):
        stack.wait_until(lambda: len(stack.ready_workers()) == 2)
        group = [keys[(len(equal) + offset) % len(keys)] for offset in range(STREAMS_PER_KILL)]
        before = count(stack)
        requests = [POPULATIONS[population](number) for population, number in group]
        seen = asyncio.run(run_all(stack, requests, lambda: fatal(stack)))
        results = dict(zip(group, seen, strict=True))
        for key in group:
            equal.append(results[key] == verdicts.alone[key])
            if not equal[-1]:
                verdicts.show_difference(key, results)
        affected += count(stack) - before
        kills += 1
    condition = fatal.__name__.replace("_", " ")
    verdicts.told(keys[0][0], condition, equal, f" ({affected} {count.__name__}, {kills} kills)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--populations", default=",".join(POPULATIONS), help="which of these, comma-separated")
    given = parser.parse_args()
    populations = given.populations.split(",")
    keys = [(population, number) for number in range(given.requests) for population in populations]
    scratch = Path(tempfile.mkdtemp(prefix="pagoda-determinism-"))
    for name in ("pair", "tiny", "undrafted"):
        (scratch / name).mkdir()
    with running_stack(scratch / "pair", *NAME, workers=2) as pair:
        verdicts = Verdicts(in_groups(pair, keys, 1))
        drafts = pair.stats().accepted_draft_tokens
        verdicts.show(f"in the company of {COMPANY - 1} others", in_groups(pair, keys, COMPANY))
        verdicts.show("again, after a prefix hit", in_groups(pair, keys, AGAIN))
        for population in populations:
            own = [key for key in keys if key[0] == population]
            under_kills(pair, own, verdicts, kill_the_busiest, replayed)
            under_kills(pair, own, verdicts, kill_the_engine_core, resumed)
    with running_stack(scratch / "undrafted", *NAME, "--speculation-tokens", "0") as undrafted:
        results = in_groups(undrafted, keys, COMPANY)
        verdicts.show("without drafts", results, f" ({drafts} held with, {undrafted.stats().draft_tokens} without)")
    with running_stack(scratch / "tiny", *NAME, *TINY) as tiny:
        results = in_groups(tiny, keys, COMPANY)
        preemptions = tiny.stats().preemptions
        verdicts.show("on a tiny block pool", results, f" ({preemptions} preemptions)")
    sys.exit(0 if verdicts.good and preemptions else 1)


if __name__ == "__main__":
    main()
