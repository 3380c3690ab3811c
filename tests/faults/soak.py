"""For long, at half load, one thing after another goes wrong with two of everything: every answer is the one that an
undisturbed stack gives, and in the end nothing is left of it all.

What goes wrong is drawn from a seed. Of each pair one is hit at a time, and only while both do their work: two at once
is more than two of everything promise. What is hit is started again, as a supervisor would.
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
MOST_S = 12.0  # that something stands still, or a link is bad: longer than anybody is borne
GAPS_S = (0.5, 6.0)  # between two faults
CLIENT_S = 30.0  # a client that hears nothing for so long goes elsewhere
RETRIES = 30  # of who is told to come again
SPARE_DESCRIPTORS = 12  # that a process may open when it is first asked for something


class Fault(NamedTuple):
    """`seconds` for what has a length; `gap_s` until the next."""

    what: str
    target: str
    seconds: float
    gap_s: float

    def __str__(self) -> str:
        return f"{self.what} {self.target}" + (f" for {self.seconds:.1f} s" if self.what not in (KILL, TERM) else "")


def faults(seed: int) -> Iterator[Fault]:
    """Without end; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        seconds, gap_s = rng.uniform(0.2, MOST_S), rng.uniform(*GAPS_S)
        if rng.random() < 0.25:
            yield Fault(rng.choice(FAULTS), rng.choice(LINKS), seconds, gap_s)
        else:
            yield Fault(rng.choice((KILL, KILL, TERM, STOP)), rng.choice(PROCESSES), seconds, gap_s)


class Soak:
    """`tell` gets a line for each fault. Whatever runs or ran is in `seen`."""

    def __init__(self, place: Doubled, report: Report, tell: Callable[[str], None]) -> None:
        self._place = place
        self._report = report
        self._tell = tell
        self._began = time.monotonic()
        self._busy: dict[str, asyncio.Task[None]] = {}  # by pair
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
        """Workers come and go under names of their own."""
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
    """And whether it is as it was."""
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
    """Each as the log it is in, and which one of it."""
    found: set[str] = set()
    for log in place.directory.glob("*.log"):
        found |= {f"{log.name}: {i}" for i in range(log.read_text(errors="replace").count("Traceback (most recent"))}
    return found
