#!/usr/bin/env python3
"""Injects faults into a running stack, and counts the outcomes of streams when processes die, freeze or lose links.

    python bench/faults.py [--only kills,pauses] [--seed 0] [--list]
    python bench/faults.py --soak [--minutes 120] [--seed 0]

Every stream is compared with the same request on the same stack without faults: text, token ids, log-probabilities,
ending and usage. Prints a line per scenario; the exit status is 1 if a stream differed, broke or ended twice, or if the
stack did not become ready again with no block in use and no process left over. All scenarios take about an hour. With
--soak (`make soak`), random faults of all kinds follow each other for two hours; its short form takes three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults import batches, scenarios
from tests.faults import leaving as scenes
from tests.faults.doubled import ENGINE_CORES, GATEWAYS, doubled
from tests.faults.failing import FAIL_FILE, POINTS
from tests.faults.proxy import FAULTS
from tests.faults.soak import soak
from tests.faults.stack import apart, served
from tests.faults.streams import Report, undisturbed
from tests.faults.variants import undisturbed as undisturbed_variants

SOAK_MINUTES = 120.0


def kills(directory: Path, seed: int) -> Iterator[Report]:
    with served(directory) as place:
        yield scenarios.kill_every(place, seed=seed)
        for number in range(10):
            yield scenarios.kills_under_one_stream(place, seed=seed + number)


def pauses(directory: Path, seed: int) -> Iterator[Report]:
    with served(directory) as place:
        yield scenarios.pauses(place, "engine-core", [5.0, 6.0, 8.0, 22.0] * 10, seed=seed)
        yield scenarios.pauses(place, "worker", [5.0, 12.0] * 5, seed=seed)


def standstill(directory: Path, seed: int) -> Iterator[Report]:
    with served(directory) as place:
        for seconds in (25.0, 90.0):
            yield scenarios.pauses(place, "", [seconds], seed=seed)


def links(directory: Path, seed: int) -> Iterator[Report]:
    with apart(directory) as place:
        for fault in FAULTS:
            for link in ("worker", "gateway"):
                yield scenarios.links(place, link, fault, seed=seed)


def storm(directory: Path, seed: int) -> Iterator[Report]:
    with served(directory, *scenarios.LITTLE_ROOM) as place:
        yield scenarios.storm(place, seed=seed)


def health(directory: Path, seed: int) -> Iterator[Report]:
    with served(directory) as place:
        for role in scenarios.UNREADY_S:
            yield scenarios.probes_tell_of_what_stands_still(place, role)
    with served(directory, *scenarios.LITTLE_ROOM) as place:
        yield scenarios.probes_under_overload(place, seed=seed)


def choices(directory: Path, seed: int) -> Iterator[Report]:
    with served(directory) as place:
        yield scenarios.many_choices(place, seed=seed)


def strangers(directory: Path, seed: int) -> Iterator[Report]:
    with apart(directory) as place:
        other = ["--model", str(scenarios.changed_weights(directory))]
        yield scenarios.stranger_takes_over_nothing(place, "other weights", other, seed=seed)
    with apart(directory) as place:
        yield scenarios.stranger_takes_over_nothing(
            place, "other kernels", ["--kernels", scenarios.other_kernels()], seed=seed
        )


def failing(directory: Path, seed: int) -> Iterator[Report]:
    order = directory / "order"
    os.environ[FAIL_FILE] = str(order)
    with apart(directory, program="tests.faults.failing") as place:
        for number in range(5):
            yield scenarios.one_memory_error(place, order, seed=seed + number)
        oracle = undisturbed(place.url, scenarios.company(seed))
        for point in itertools.chain.from_iterable(POINTS.values()):
            yield scenarios.one_fails(place, order, point, oracle, seed=seed)


def batch(directory: Path, seed: int) -> Iterator[Report]:
    yield batches.kill_everything_under_a_batch(directory)


def leaving(directory: Path, seed: int) -> Iterator[Report]:
    with apart(directory) as alone:
        yield scenarios.last_worker_leaves(alone, seed=seed)
    with doubled(directory) as place:
        oracle = asyncio.run(undisturbed_variants(place.urls))
        for name in ("core-0-a", "core-1-a", *ENGINE_CORES, GATEWAYS[0]):
            yield scenes.asked_to_leave(place, name, oracle)
        yield scenes.scaled(place, oracle)


def gateways(directory: Path, seed: int) -> Iterator[Report]:
    with doubled(directory) as place:
        oracle = asyncio.run(undisturbed_variants(place.urls))
        for name in (GATEWAYS[0], *ENGINE_CORES):
            yield scenes.killed(place, name, oracle)
            yield scenes.stopped(place, name, oracle)
        for link in ("gateway", "worker"):
            yield scenes.cut(place, link, oracle)


def soaked(directory: Path, seed: int, minutes: float = SOAK_MINUTES) -> Iterator[Report]:
    """Only run with --soak, not by default."""
    with doubled(directory) as place:
        oracle = asyncio.run(undisturbed_variants(place.urls))
        yield soak(place, oracle, 60.0 * minutes, seed=seed, tell=partial(print, flush=True))


Scenario = Callable[[Path, int], Iterator[Report]]
SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        kills,
        pauses,
        standstill,
        links,
        storm,
        health,
        choices,
        strangers,
        failing,
        batch,
        leaving,
        gateways,
    )
}


def run(name: str, scenario: Scenario, seed: int) -> bool:
    """Run one scenario on a stack of its own; False if it reported a violation."""
    sound = True
    with tempfile.TemporaryDirectory() as directory:
        try:
            began = time.monotonic()
            for report in scenario(Path(directory), seed):
                print(f"{name:10} {report.line()}; {time.monotonic() - began:.0f} s", flush=True)
                for problem in report.problems[:10]:
                    print(f"{'':10}   {problem}", flush=True)
                sound = sound and not report.problems
                began = time.monotonic()
        except Exception as error:  # noqa: BLE001 - a stack that falls is a result; the other scenarios have stacks of their own
            print(f"{name:10} ended early: {type(error).__name__}: {str(error)[-2000:]}", flush=True)
            traceback.print_exc()
            return False
    return sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", action="store_true", help="random faults for long, and nothing else")
    parser.add_argument("--minutes", type=float, default=SOAK_MINUTES, help="of --soak [%(default)s]")
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(SCENARIOS))
        return 0
    if arguments.soak:
        return 0 if run("soak", partial(soaked, minutes=arguments.minutes), arguments.seed) else 1
    names = arguments.only.split(",")
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    results = [run(name, SCENARIOS[name], arguments.seed) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
