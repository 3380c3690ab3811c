#!/usr/bin/env python3
"""Ten times a stack's capacity, and one tenant's flood beside another's few requests; each compared with the same stack
in the same run.

    python bench/overload.py [MODEL] [--seconds 60] [--times 10] [--only overload,tenants] [--seed 0]

overload: a closed loop measures the stack's peak throughput, for as long as the overload will last, then requests
arrive at `--times` times that rate. Goodput is the tokens per second of complete answers; memory is that of all
processes, in the middle of the overload and at its end; the stack has recovered when a request after the overload gets
its first token within twice the time that takes on an idle stack. tenants: under the policy `fair`, the times to first
token of a key with occasional requests, alone and while another key's requests fill all rows and the queue. The exit
status is 1 if goodput is below 0.9 of the peak, memory grows by more than a tenth, recovery takes more than 2 s, or the
small key waits more than twice as long (p95).

The gateway accepts few connections (--connections), as one for a small stack should: a connection refused costs least,
and requests beyond what the engine core may queue would only wait on their way there. The KV cache is small enough for
the peak to touch all of it, because its pages are allocated when first written; memory growth after that is unintended.
A separate process measures recovery, so that it is not busy with the load's answers. The demo model is so small that
serving its tokens, refusing ten times as many requests and sending them compete for one machine; a larger MODEL shows
what the stack does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from tests.faults.stack import Place, served

from pagoda.bench.load import LoadClient, Plan, Sent, run_load
from pagoda.bench.workload import BodyMaker, WorkloadRow, WorkloadShape, arrivals, make_rows
from pagoda.tools.http_stream import Target

MIB = 1024**2
ROWS = 32
QUEUE_S = 1.0  # how long a request may wait; one that would wait longer is refused at once
SHAPE = {"input_len": 64, "output_len": 64, "output_spread": 16.0}
IDLE_PROBES, PROBE_GAP_S = 20, 0.2
SMALL_KEY, LARGE_KEY = "small-key-of-a-tenant", "large-key-of-a-tenant"
FLOOD = 3 * ROWS
BLOCKS = 20 * ROWS  # a request needs 4 or 5
TIMEOUT_S = 120.0


def client_at(url: str, seed: int, key: str = "") -> LoadClient:
    bodies = BodyMaker(model="demo", seed=seed, salt=f"{seed}{key}", token_ids=range(30, 120))
    return LoadClient(Target(url, key), bodies, TIMEOUT_S)


def rows(count: int, seed: int, **other: float) -> list[WorkloadRow]:
    return make_rows(WorkloadShape(num_requests=count, **SHAPE | other), seed)  # type: ignore[arg-type]


def whole(sent: Sent) -> bool:
    return sent.timing.complete and sent.timing.error is None


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def tokens_per_s(sent: list[Sent], began: float, seconds: float) -> float:
    """Counts answers that were complete by the end of that time."""
    done = [one for one in sent if whole(one) and one.timing.ended <= began + seconds]
    return sum(one.timing.output_tokens or 0 for one in done) / seconds


async def first_tokens(client: LoadClient, count: int, seed: int) -> list[float]:
    """Seconds to first token of sequential requests."""
    found = []
    for index, row in enumerate(rows(count, seed)):
        sent = await client.send(1_000_000 + index, row)
        if not whole(sent) or sent.timing.first is None:
            raise RuntimeError(f"a probe was not answered: {sent.timing.error}")
        found.append(sent.timing.first - sent.timing.started)
        await asyncio.sleep(PROBE_GAP_S)
    return found


class Memory:
    """Samples the memory of all processes of a stack twice a second: (seconds since the start, bytes)."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.seen: list[tuple[float, int]] = []

    async def watch(self) -> None:
        began = time.monotonic()
        while True:
            self.seen.append((time.monotonic() - began, await asyncio.to_thread(self._now)))
            await asyncio.sleep(0.5)

    def _now(self) -> int:
        found = 0
        for process in self._place.family():
            with_rss: Any = process.memory_info()
            found += with_rss.rss
        return found

    def between(self, first: float, last: float) -> int:
        return max(rss for at, rss in self.seen if first <= at <= last)


async def recovery_s(url: str, limit_s: float, began: float, seed: int) -> float:
    """Seconds from `began` (`time.monotonic`) until the first of sequential requests, of one token each, gets its token
    within the limit."""
    client = client_at(url, seed)
    await asyncio.sleep(began - time.monotonic())
    for index, row in enumerate(itertools.cycle(rows(20, seed, output_len=1, output_spread=0.0))):
        sent = await client.send(2_000_000 + index, row)
        since_s = time.monotonic() - began
        if sent.timing.first is not None and sent.timing.first - sent.timing.started <= limit_s:
            return since_s - (sent.timing.ended - sent.timing.first)
        if since_s > TIMEOUT_S:
            return TIMEOUT_S
    raise AssertionError


async def recovery_apart(url: str, limit_s: float, began: float, seed: int) -> float:
    """Run `recovery_s` in another process."""
    words = ["--recovery", url, str(limit_s), str(began), str(seed)]
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, *words, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    return float(told)


async def overloaded(place: Place, seconds: float, times: float, seed: int) -> bool:
    client = client_at(place.url, seed)
    await first_tokens(client, 5, seed)  # warm-up
    idle = p95(await first_tokens(client, IDLE_PROBES, seed + 1))
    began = time.perf_counter()
    peak = await run_load(client, Plan(rows(100_000, seed + 2), 2 * ROWS, None, seconds))
    peak_tokens = tokens_per_s(peak.sent, began, seconds)
    rate = sum(map(whole, peak.sent)) / peak.wall_s
    print(f"idle: first token p95 {1000 * idle:.0f} ms; peak: {peak_tokens:.0f} tokens/s, {rate:.1f} requests/s")
    many = rows(int(times * rate * seconds), seed + 3)
    memory = Memory(place)
    watching = asyncio.create_task(memory.watch())
    began = time.perf_counter()
    plan = Plan(many, 1, arrivals(many, times * rate, 1.0, seed), seconds)
    loading = asyncio.create_task(run_load(client, plan))
    recovered = await recovery_apart(place.url, 2 * idle, time.monotonic() + seconds, seed + 4)
    result = await loading
    watching.cancel()
    good = tokens_per_s(result.sent, began, seconds)
    middle, end = memory.between(seconds / 3, 2 * seconds / 3), memory.between(2 * seconds / 3, seconds)
    refused = [one for one in result.sent if not whole(one)]
    kinds = statistics.multimode([str(one.timing.error)[:60] for one in refused] or ["none"])
    print(
        f"{times:g} x: {len(result.sent)} requests, {len(refused)} refused (mostly: {kinds[0]}), "
        f"{result.client_cpu_s / result.wall_s:.0%} of a core taken by the clients\n"
        f"goodput {good:.0f} tokens/s, {good / peak_tokens:.2f} of the peak; memory {middle / MIB:.0f} MiB in the "
        f"middle, {end / MIB:.0f} at the end; recovered in {recovered:.2f} s"
    )
    return good >= 0.9 * peak_tokens and end <= 1.1 * middle and recovered <= 2.0


async def two_tenants(place: Place, seconds: float, seed: int) -> bool:
    small, large = client_at(place.url, seed, SMALL_KEY), client_at(place.url, seed + 1, LARGE_KEY)
    await first_tokens(small, 5, seed)
    idle = p95(await first_tokens(small, IDLE_PROBES, seed + 1))
    flooding = asyncio.create_task(run_load(large, Plan(rows(100_000, seed + 2), FLOOD, None, seconds)))
    await asyncio.sleep(seconds / 6)
    count = max(IDLE_PROBES, int(seconds / 3 / PROBE_GAP_S))
    beside = p95(await first_tokens(small, count, seed + 3))
    flood = await flooding
    print(
        f"fair: small key's first token p95 {1000 * idle:.0f} ms alone, {1000 * beside:.0f} ms ({beside / idle:.1f} x) "
        f"beside {FLOOD} of another key in flight, of which {sum(map(whole, flood.sent))} were answered"
    )
    return beside <= 2 * idle


def with_stack(options: list[str], measure: Callable[[Place], Any]) -> bool:
    with tempfile.TemporaryDirectory() as directory, served(Path(directory), *options) as place:
        return bool(asyncio.run(measure(place)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory [the demo model]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload [%(default)s]")
    parser.add_argument("--times", type=float, default=10.0, help="the peak [%(default)s]")
    parser.add_argument("--only", default="overload,tenants")
    parser.add_argument("--connections", type=int, default=4 * ROWS, help="that the gateway takes [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recovery", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.recovery:
        url, limit_s, began, seed = given.recovery
        print(asyncio.run(recovery_s(url, float(limit_s), float(began), int(seed))))
        return 0
    load = psutil.getloadavg()[0]
    print(f"load of the machine at the start: {load:.1f}", flush=True)
    threads = max(1, len(os.sched_getaffinity(0)) - 1)  # leaves a core to gateway, engine core and clients
    options = [*filter(None, [given.model]), f"--max-rows={ROWS}", "--no-log-requests", f"--threads={threads}"]
    sound = True
    if "overload" in given.only.split(","):
        most = ("--max-connections", "--max-connections-per-client")
        more = [
            f"--queue-timeout-s={QUEUE_S:g}",
            f"--num-blocks={BLOCKS}",
            *(f"{name}={given.connections}" for name in most),
        ]
        sound &= with_stack([*options, *more], lambda place: overloaded(place, given.seconds, given.times, given.seed))
    if "tenants" in given.only.split(","):
        more = ["--policy=fair", f"--api-key={SMALL_KEY},{LARGE_KEY}"]
        sound &= with_stack([*options, *more], lambda place: two_tenants(place, given.seconds, given.seed))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
