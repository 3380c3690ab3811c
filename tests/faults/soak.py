"""A long run at half load with one fault after another on two of everything: every answer must equal the one of an
undisturbed stack, and nothing may leak.

Faults are drawn from a seed. They hit one process of a pair at a time, and only while both work: two of everything do
not promise to survive both failing at once. A process that was hit is restarted, as a supervisor would do.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import psutil
from tests.e2e.stack import remaining
from tests.faults.doubled import ENGINE_CORES, GATEWAYS, Doubled, core_of
from tests.faults.leaving import RECOVERY_S, Oracle
from tests.faults.proxy import FAULTS
from tests.faults.stack import pause
from tests.faults.streams import Flow, Report
from tests.faults.variants import disturbed

PROCESSES = (*ENGINE_CORES, "worker of core-0", "worker of core-1", *GATEWAYS)
LINKS = ("gateway link", "worker link")  # both of the first engine core
KILL, TERM, STOP = "kill -9", "SIGTERM", "SIGSTOP"
MOST_S = 12.0  # duration of a freeze or link fault, at most: longer than any tier tolerates a silent peer
GAPS_S = (0.5, 6.0)  # least and greatest gap between two faults
CLIENT_S = 30.0  # a client that receives nothing for this long tries another gateway
RETRIES = 30  # of a client that is refused with Retry-After
SPARE_DESCRIPTORS = 12  # a process may open these for its first requests


class Fault(NamedTuple):
    """`seconds` is the duration, if it has one; `gap_s` the time until the next fault."""

    what: str
    target: str
    seconds: float
    gap_s: float

    def __str__(self) -> str:
        return f"{self.what} {self.target}" + (f" for {self.seconds:.1f} s" if self.what not in (KILL, TERM) else "")


def faults(seed: int) -> Iterator[Fault]:
    """An endless sequence of faults, determined by the seed."""
    rng = random.Random(seed)
    while True:
        seconds, gap_s = rng.uniform(0.2, MOST_S), rng.uniform(*GAPS_S)
        if rng.random() < 0.25:
            yield Fault(rng.choice(FAULTS), rng.choice(LINKS), seconds, gap_s)
        else:
            yield Fault(rng.choice((KILL, KILL, TERM, STOP)), rng.choice(PROCESSES), seconds, gap_s)


class Soak:
    """Injects the faults. `tell` gets a line for each; `seen` holds every process that ran so far."""

    def __init__(self, place: Doubled, report: Report, tell: Callable[[str], None]) -> None:
        self._place = place
        self._report = report
        self._tell = tell
        self._began = time.monotonic()
        self._busy: dict[str, asyncio.Task[None]] = {}  # by the pair's first name
        self.seen: set[psutil.Process] = set(place.family())
        self.count = 0

    async def run(self, seed: int, seconds: float) -> None:
        until = self._began + seconds
        for fault in faults(seed):
            if time.monotonic() >= until:
                break
            pair = GATEWAYS if fault.target in GATEWAYS else ENGINE_CORES
            if (busy := self._busy.pop(pair[0], None)) is not None:
                await busy
            await asyncio.to_thread(self._place.wait_until, partial(self._all_well, pair), RECOVERY_S)
            self.seen |= set(self._place.family())
            self.count += 1
            self._tell(f"{time.monotonic() - self._began:7.1f} s  {fault}; {dict(self._report.kinds)}")
            self._busy[pair[0]] = asyncio.create_task(self._strike(fault), name=str(fault))
            await asyncio.sleep(min(fault.gap_s, max(0.0, until - time.monotonic())))
        await asyncio.gather(*self._busy.values())

    def _all_well(self, names: Sequence[str]) -> bool:
        return all(map(self._place.well, names))

    async def _strike(self, fault: Fault) -> None:
        place = self._place
        if fault.target in LINKS:
            proxy = place.gateway_link if fault.target == LINKS[0] else place.worker_link
            await proxy.strike(fault.what, fault.seconds)
            return
        name = self._named(fault.target)
        if fault.what == STOP:
            await asyncio.to_thread(pause, [place.process(name)], fault.seconds)
            return
        place.process(name).send_signal(signal.SIGTERM if fault.what == TERM else signal.SIGKILL)
        code = await asyncio.to_thread(place.exit_code, name)
        if fault.what == TERM and code:
            self._report.problems.append(f"{name} was asked to leave and ended with {code}")
        place.start(name)

    def _named(self, target: str) -> str:
        """The name of the process to hit. "worker of CORE" means one that runs now, since workers come and go."""
        if not target.startswith("worker"):
            return target
        core = target.removeprefix("worker of ")
        return next(name for name in self._place.names if name not in ENGINE_CORES + GATEWAYS and core_of(name) == core)


def soak(
    place: Doubled, oracle: Oracle, seconds: float, *, seed: int = 0, tell: Callable[[str], None] = lambda line: None
) -> Report:
    report = Report(f"faults for {seconds:g} s")
    before, told_before = place.descriptors(), tracebacks(place)
    soaking = Soak(place, report, tell)

    async def act(flow: Flow) -> None:
        await flow.more(1)
        await soaking.run(seed, seconds)

    asked = disturbed(place.urls, oracle, act, report, again=True, rests=True, timeout_s=CLIENT_S, max_retries=RETRIES)
    num_resumed = asyncio.run(asked)
    left = [*_blocks(place), *_descriptors(place, before), *_processes(place, soaking.seen)]
    report.problems += left
    report.problems += [f"the log of {name} has a new traceback" for name in tracebacks(place) - told_before]
    missed = ", ".join(f"{name} {report.misses[name]}" for name in ("lost", "duplicated", "different"))
    leaks = f"leaked: {'; '.join(left) or 'blocks 0, descriptors 0, processes 0'}"
    report.note = f"faults {soaking.count}; tokens {missed}; {leaks}; {num_resumed} streams resumed"
    return report


def _blocks(place: Doubled) -> list[str]:
    """Problems with recovery: processes that are not ready, or blocks still in use."""
    try:
        place.wait_until(place.whole, RECOVERY_S)
    except (TimeoutError, AssertionError) as error:
        return [f"the stack did not recover, or blocks are in use: {error}"]
    return []


def _descriptors(place: Doubled, before: dict[str, int]) -> list[str]:
    def more() -> dict[str, int]:
        now = place.descriptors()
        return {name: now[name] - before[name] for name in now if name in before}

    try:
        place.wait_until(lambda: max(more().values()) <= SPARE_DESCRIPTORS, RECOVERY_S)
    except (TimeoutError, AssertionError):
        return [f"descriptors more than there were: {more()}"]
    return []


def _processes(place: Doubled, seen: set[psutil.Process]) -> list[str]:
    left = remaining(list(seen - set(place.family())))
    return [f"processes {left}"] if left else []


def tracebacks(place: Doubled) -> set[str]:
    """Each traceback as the name of its log and its number there."""
    found: set[str] = set()
    for log in place.directory.glob("*.log"):
        found |= {f"{log.name}: {i}" for i in range(log.read_text(errors="replace").count("Traceback (most recent"))}
    return found
