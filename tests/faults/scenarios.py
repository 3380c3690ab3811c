"""Faults injected into a stack, and what must still hold for every stream.

Each scenario runs seeded requests first undisturbed, then disturbed, and reports the differences. Unless it says
otherwise, only requests that have not begun may be refused.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
from tests.faults.failing import MEMORY_POINT
from tests.faults.stack import ROLES, Apart, Place, kill, pause, signal_all
from tests.faults.streams import (
    NO_ENDING,
    STREAM_TIMEOUT_S,
    UNLIMITED,
    Disturbance,
    Flow,
    Outcome,
    Report,
    Request,
    Seen,
    make_requests,
    run_streams,
    stream,
    undisturbed,
)

from pagoda_proto import times

RECOVERY_S = 240.0
PROBE_S = 0.5  # a probe itself may take this long
DOOMED_SEED = 0xDEAD
LITTLE_ROOM = ("--max-rows=16", "--max-queued-requests=16")  # more requests than these are refused
MOST_ROUNDS = 10  # a round is repeated if its streams ended before the fault
LONG = 1800  # tokens: the demo model's context, less a prompt


class Load(NamedTuple):
    """Number of streams, each of `max_tokens` / 2 to `max_tokens` tokens. Faults are injected after the first few
    tokens, so more streams or tokens find rarer failures but no other kind."""

    streams: int
    max_tokens: int


FULL, LESS, LIGHT = Load(8, 400), Load(4, 400), Load(4, 120)


def company(seed: int, load: Load = LESS) -> list[Request]:
    """The requests that run during a fault. They depend only on the seed, so each stack computes their oracle once."""
    return make_requests(seed, load.streams, max_tokens=load.max_tokens)


def _judge(
    place: Place,
    report: Report,
    requests: Sequence[Request],
    oracle: Sequence[Outcome],
    disturb: Disturbance,
    *,
    again: bool = False,
    clients: int = 8,
    may_fail: bool = False,
) -> Report:
    """Run and judge the streams, then check that the stack is ready again and no block is in use."""
    streams = run_streams(place.url, requests, clients=clients, disturb=disturb, again=again)
    report.judge(asyncio.run(streams), oracle, may_fail)
    _recovered(place, report)
    return report


def _recovered(place: Place, report: Report) -> None:
    try:
        place.wait_until(place.ready, RECOVERY_S)
        place.wait_until(lambda: place.stats().blocks_used == 0, RECOVERY_S)
    except (TimeoutError, AssertionError) as error:
        report.problems.append(f"the stack did not recover: {error}")


def _kill_one(place: Place, rng: random.Random) -> bool:
    victims = place.children(rng.choice(ROLES))
    kill(victims[:1] if len(victims) < 2 else [rng.choice(victims)])
    return bool(victims)


def kill_every(place: Place, *, seed: int = 0, seconds: float = 60.0, gap_s: float = 2.0, count: int = 16) -> Report:
    """Kill a worker or engine core every `gap_s` seconds while clients run one stream after another."""
    rng, report = random.Random(seed), Report(f"a kill every {gap_s:g} s for {seconds:g} s")
    requests = make_requests(seed, count)
    oracle, kills = undisturbed(place.url, requests), 0

    async def disturb(flow: Flow) -> None:
        nonlocal kills
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            kills += _kill_one(place, rng)
            await asyncio.sleep(gap_s)

    _judge(place, report, requests, oracle, disturb, again=True, clients=4)
    report.note = f"{kills} kills"
    if not report.kinds["identical"]:
        report.problems.append("no stream at all came through")
    return report


def kills_under_one_stream(place: Place, *, seed: int = 0, kills: int = 10, max_tokens: int = LONG) -> Report:
    """Run one long stream, and kill a worker or engine core each time it has continued."""
    rng, report = random.Random(seed), Report(f"{kills} kills under one stream")
    [request] = make_requests(seed, 1, choices=[1])
    request["max_tokens"] = max_tokens
    done, wait_s = 0, 0.0

    async def disturb(flow: Flow) -> None:
        nonlocal done, wait_s
        while done < kills and await flow.more(3):
            done += _kill_one(place, rng)
        await flow.more(1)
        wait_s = flow.longest_wait_s

    _judge(place, report, [request], undisturbed(place.url, [request]), disturb, clients=1)
    report.note = f"{done} kills, {wait_s:.2f} s at most for the next token"
    if done < kills:
        report.problems.append(f"the stream ended after {done} kills")
    return report


def pauses(place: Place, role: str, seconds: Sequence[float], *, seed: int = 0, load: Load = FULL) -> Report:
    """Repeatedly SIGSTOP every process of a role (of the whole stack for "") for a while."""
    report = Report(f"{role or 'everything'} stopped {len(seconds)} times")
    requests = company(seed, load)
    oracle = undisturbed(place.url, requests)

    async def disturb(flow: Flow) -> None:
        for duration_s in seconds:
            await flow.more(5)
            await asyncio.to_thread(pause, place.children(role) if role else place.family(), duration_s)

    _judge(place, report, requests, oracle, disturb, again=True, clients=load.streams)
    report.note = f"{min(seconds):g} to {max(seconds):g} s"
    return report


def links(
    place: Apart, link: str, fault: str, *, times: int = 10, hold_s: float = 8.0, seed: int = 0, load: Load = FULL
) -> Report:
    """Repeatedly inject a fault (see `proxy.FAULTS`) into a link ("gateway" or "worker")."""
    report = Report(f"{link} link: {fault}, {times} times")
    proxy = place.gateway_link if link == "gateway" else place.worker_link
    requests = company(seed, load)
    oracle = undisturbed(place.url, requests)

    async def disturb(flow: Flow) -> None:
        for _ in range(times):
            await flow.more(20)
            await proxy.strike(fault, hold_s)

    _judge(place, report, requests, oracle, disturb, again=True, clients=load.streams)
    report.note = f"{proxy.num_links} connections"
    return report


UNREADY_S = {
    "worker": times.WORKER_DEAD_S + times.LOAD_KEEPALIVE_S,
    "engine-core": times.ENGINE_SILENT_S + times.LOAD_KEEPALIVE_S,
}
"""A gateway's readiness probe must fail this long after its only process of that role froze."""


def probes_tell_of_what_stands_still(place: Place, role: str, *, trials: int = 20) -> Report:
    report = Report(f"probes while the {role} stands still")
    taken: list[float] = []
    for _ in range(trials):
        place.wait_until(place.ready, RECOVERY_S)
        frozen = place.children(role)
        signal_all(frozen, signal.SIGSTOP)
        began = time.monotonic()
        try:
            while place.ready() and time.monotonic() - began < 10 * UNREADY_S[role]:
                time.sleep(0.02)
        finally:
            taken.append(time.monotonic() - began)
            signal_all(frozen, signal.SIGCONT)
    late = [seconds for seconds in taken if seconds > UNREADY_S[role] + PROBE_S]
    report.problems += [f"still ready after {seconds:.1f} s" for seconds in late]
    report.note = f"unready in {trials - len(late)} of {trials}, after {min(taken):.1f} to {max(taken):.1f} s"
    return report


def probes_under_overload(place: Place, *, seed: int = 0, seconds: float = 30.0, clients: int = 200) -> Report:
    """Readiness probes must succeed on a stack that is merely busy."""
    report = Report(f"probes beside {clients} clients")
    requests = make_requests(seed, clients, max_tokens=200, choices=[1])
    answers: Counter[bool] = Counter()

    async def disturb(flow: Flow) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            answers[await asyncio.to_thread(place.ready)] += 1
            await asyncio.sleep(0.05)

    asyncio.run(run_streams(place.url, requests, clients=clients, disturb=disturb, again=True))
    report.note = f"{answers[True]} of {answers.total()} probes were told that it is ready"
    report.problems += [f"{answers[False]} were told that it is not"] * (answers[False] > 0)
    return report


def storm(place: Place, *, seed: int = 0, seconds: float = 60.0, clients: int = 60) -> Report:
    """More clients than the stack admits retry at once, ignoring Retry-After, while the engine core is killed.

    Admitted requests must be answered as usual, refused ones must get a Retry-After, and the stack must recover.
    """
    report = Report(f"{clients} clients that ask again at once")
    requests = make_requests(seed, clients, max_tokens=60, choices=[1])
    oracle, told_when = undisturbed(place.url, requests), Counter[bool]()
    until = time.monotonic() + seconds

    async def ask(client: httpx.AsyncClient, index: int) -> list[Seen]:
        seen: list[Seen] = []
        while time.monotonic() < until + 60 * (not told_when.total()) or (seen and seen[-1][1].status == 503):
            seen.append((index, await stream(client, requests[index])))
            told_when[seen[-1][1].retry_after is not None] += seen[-1][1].status == 503
        return seen

    async def rage() -> list[Seen]:
        async with httpx.AsyncClient(base_url=place.url, timeout=STREAM_TIMEOUT_S, limits=UNLIMITED) as client:
            asking = [asyncio.create_task(ask(client, index)) for index in range(clients)]
            await asyncio.sleep(seconds / 2)
            await asyncio.to_thread(kill, place.children("engine-core"))
            return [each for part in await asyncio.gather(*asking) for each in part]

    report.judge(asyncio.run(rage()), oracle)
    _recovered(place, report)
    report.note = f"refused {told_when.total()} times"
    if not (told_when[True] and report.kinds["identical"]) or told_when[False]:
        report.problems.append(f"told when to come: {dict(told_when)}")
    return report


def last_worker_leaves(place: Apart, *, seed: int = 0, load: Load = FULL) -> Report:
    """SIGTERM the only worker: it finishes its streams, since no other worker could continue them. Requests that arrive
    meanwhile wait for the next worker."""
    report = Report("the last worker leaves")
    requests = company(seed, load)
    oracle, replays = undisturbed(place.url, requests), place.stats().replays

    async def disturb(flow: Flow) -> None:
        await flow.more(20)
        [worker] = place.children("worker-0")
        worker.terminate()
        await asyncio.to_thread(place.wait_until, lambda: not place.children("worker-0"), RECOVERY_S)
        place.start_worker("worker-0")

    half = load.streams // 2  # the others start while it is draining
    _judge(place, report, requests, oracle, disturb, clients=half)
    if place.stats().replays != replays:
        report.problems.append("a request was computed again")
    return report


def many_choices(
    place: Place, *, seed: int = 0, count: int = 2000, gap_s: float = 5.0, most_kills: int = 100
) -> Report:
    """Requests for several choices, while a worker or engine core is killed now and then."""
    rng, report = random.Random(seed), Report(f"{count} requests of 2 to 4 choices")
    requests = make_requests(seed, count, max_tokens=40, choices=(2, 3, 4))
    oracle, kills = undisturbed(place.url, requests), 0

    async def disturb(flow: Flow) -> None:
        nonlocal kills
        while kills < most_kills and await flow.more(20):
            kills += _kill_one(place, rng)
            await asyncio.sleep(gap_s)

    _judge(place, report, requests, oracle, disturb)
    report.note = f"{kills} kills"
    return report


def changed_weights(directory: Path) -> Path:
    """A copy of the demo model with some bits of its weights flipped: same headers, other tokens."""
    from pagoda.tools.checkpoints import locate

    changed = directory / "changed"
    shutil.copytree(locate("", ""), changed)
    path = changed / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = len(data) // 2
    data[begin : begin + 4096 : 2] = bytes(byte ^ 0x40 for byte in data[begin : begin + 4096 : 2])
    path.write_bytes(data)
    return changed


def other_kernels() -> str:
    """A kernel back end that `auto` does not choose here."""
    from pagoda_worker.kernels.cpu.build import LIBRARY

    return "torch" if LIBRARY.exists() else "reference"


def stranger_takes_over_nothing(
    place: Apart, name: str, arguments: Sequence[str], *, seed: int = 0, load: Load = LESS
) -> Report:
    """The only matching worker is killed and restarted; a worker with other numerics must not take over its requests.

    A begun stream continues with its own tokens or ends in an error; no token may come from the stranger.
    """
    report = Report(f"a worker with {name} takes over nothing")
    requests = company(seed, load)
    oracle = undisturbed(place.url, requests)
    place.start_worker("stranger", *arguments)

    async def disturb(flow: Flow) -> None:
        await flow.more(20)
        kill(place.children("worker-0"))
        before = place.answers("stranger")
        await asyncio.to_thread(place.wait_until, lambda: place.answers("stranger") > before, RECOVERY_S)
        place.start_worker("worker-0")

    replays = place.stats().replays
    try:
        for _ in range(MOST_ROUNDS):
            _judge(place, report, requests, oracle, disturb, may_fail=True)
            if place.stats().replays > replays or report.problems:
                break
        else:
            report.problems.append("whenever the worker died, all streams had ended")
    finally:
        kill(place.children("stranger"))
    return report


def one_memory_error(place: Apart, order: Path, *, seed: int = 0, load: Load = FULL) -> Report:
    """One step of the only worker runs out of memory (see failing) and must be recomputed."""
    report = Report("one step runs out of memory")
    requests = company(seed, load)
    oracle = undisturbed(place.url, requests)

    async def disturb(flow: Flow) -> None:
        await flow.more(20)
        give(order, f"{MEMORY_POINT} once")

    return _judge(place, report, requests, oracle, disturb)


def give(order: Path, words: str) -> None:
    """Write the command file atomically: a reader sees all of it or nothing."""
    draft = order.with_suffix(".draft")
    draft.write_text(words)
    draft.rename(order)


def one_fails(
    place: Apart, order: Path, point: str, oracle: Sequence[Outcome], *, seed: int = 0, load: Load = LESS
) -> Report:
    """A function raises whenever it handles one request (see failing): that request must end in an error, and the
    others, whose undisturbed run is `oracle`, must be unaffected."""
    report = Report(f"failing: {point.rpartition('.')[2]}")
    [doomed] = make_requests(seed + 1, 1, choices=[1])
    doomed |= {"seed": DOOMED_SEED}
    requests = company(seed, load)
    ended: list[Outcome] = []
    beside = False  # whether the others were still running when it failed

    async def disturb(flow: Flow) -> None:
        nonlocal beside
        await flow.more(20)
        give(order, f"{point} {DOOMED_SEED}")
        ended.extend(outcome for _, outcome in await run_streams(place.url, [doomed], clients=1))
        beside = not flow.ended

    for _ in range(MOST_ROUNDS):
        _judge(place, report, requests, oracle, disturb)
        if beside or report.problems:
            break
    order.unlink()
    if not beside:
        report.problems.append("whenever it failed, the others had ended")
    if ended[-1].kind(ended[-1]) != "broken" or ended[-1].error == NO_ENDING:
        report.problems.append(f"what failed was told nothing of it: {ended[-1].describe()}")
    report.note = ended[-1].describe()
    return report
