"""One process of two of everything gets SIGTERM, is killed, freezes or loses its link: no client notices."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence

from tests.faults.doubled import ENGINE_CORES, GATEWAYS, Doubled
from tests.faults.stack import pause
from tests.faults.streams import Flow, Report
from tests.faults.variants import Answer, Request, disturbed

RECOVERY_S = 240.0
FLOWING = 60  # events over all streams; after these they count as under way
TRIES = 3
Oracle = Sequence[tuple[Request, Answer]]


def _run(
    place: Doubled,
    report: Report,
    oracle: Oracle,
    act: Callable[[Flow], Awaitable[None]],
    *,
    again: bool = False,
    rests: bool = False,
    resumes: bool = False,
    timeout_s: float = 240.0,
    max_retries: int = 0,
) -> Report:
    """Run the requests and `act` in mid-stream. With `resumes`, some stream must resume at the other gateway. Clients
    retry up to `max_retries` times if they have received nothing yet."""

    async def disturb(flow: Flow) -> None:
        if not await flow.more(FLOWING):
            report.problems.append("the streams ended before anything happened")
        await act(flow)

    patience = {"timeout_s": timeout_s, "max_retries": max_retries}
    num_resumed = asyncio.run(disturbed(place.urls, oracle, disturb, report, again=again, rests=rests, **patience))
    report.note = "; ".join(filter(None, [report.note, f"{num_resumed} streams resumed"]))
    if resumes and not num_resumed:
        report.problems.append("no stream was gone on with at the other gateway")
    try:
        place.wait_until(place.whole, RECOVERY_S)
    except (TimeoutError, AssertionError) as error:
        report.problems.append(f"the stack did not recover: {error}")
    return report


def asked_to_leave(place: Doubled, name: str, oracle: Oracle) -> Report:
    """SIGTERM: the process must exit by itself with code 0, and is restarted. An engine core's requests must move to
    the other one."""
    report = Report(f"SIGTERM: {name}")

    async def act(flow: Flow) -> None:
        moved = await asyncio.to_thread(place.num_moved)
        place.process(name).send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(place.exit_code, name)
        if code:
            report.problems.append(f"{name} ended with {code}")
        if name not in GATEWAYS:
            moved = await asyncio.to_thread(place.num_moved) - moved
            report.note = f"{moved} requests moved"
        if name in ENGINE_CORES and not moved:
            report.problems.append("no request went to the other one")
        place.start(name)

    return _run(place, report, oracle, act, resumes=name in GATEWAYS)


def streams_of(oracle: Oracle) -> Oracle:
    """Only the streaming requests. Another gateway answers the others only once sure that no gateway runs them."""
    return [(request, expected) for request, expected in oracle if request["stream"]]


def killed(place: Doubled, name: str, oracle: Oracle) -> Report:
    async def act(flow: Flow) -> None:
        place.process(name).kill()
        await asyncio.to_thread(place.exit_code, name)
        place.start(name)

    return _run(place, Report(f"kill -9: {name}"), oracle, act, resumes=name in GATEWAYS)


def stopped(place: Doubled, name: str, oracle: Oracle, seconds: float = 10.0) -> Report:
    """SIGSTOP for `seconds`. A client that receives nothing for half of that time tries the other gateway, and may come
    back, because the machine may be slow."""

    async def act(flow: Flow) -> None:
        await asyncio.to_thread(pause, [place.process(name)], seconds)

    report = Report(f"SIGSTOP for {seconds:g} s: {name}")
    return _run(place, report, oracle, act, resumes=name in GATEWAYS, timeout_s=seconds / 2, max_retries=10)


def cut(place: Doubled, link: str, oracle: Oracle, seconds: float = 8.0) -> Report:
    """Block the link between the first engine core and the gateways, or its workers, for `seconds`."""
    proxy = place.gateway_link if link == "gateway" else place.worker_link

    async def act(flow: Flow) -> None:
        proxy.hold()
        await asyncio.sleep(seconds)
        proxy.release()

    return _run(place, Report(f"network cut for {seconds:g} s: {ENGINE_CORES[0]} to its {link}s"), oracle, act)


def scaled(place: Doubled, oracle: Oracle, letters: str = "bcd", *, rests: bool = False) -> Report:
    """Scale an engine core's workers in mid-stream: from 1, add one per letter, then back to 1; again if the
    requests of those that leave were about to end anyway. With `rests`, clients pause between their requests."""
    core = ENGINE_CORES[1]
    more = [f"{core}-{letter}" for letter in letters]
    most = 1 + len(more)
    report = Report(f"{core}: 1 to {most} to 1 workers")

    leaving = [f"{core}-a", *more[:-1]]

    async def act(flow: Flow) -> None:
        for started in (more, *[leaving] * (TRIES - 1)):
            for name in started:
                place.start(name)
            await asyncio.to_thread(place.wait_until, lambda: len(place.workers(core)) == most)
            await asyncio.to_thread(place.wait_until, lambda: place.rows(core, leaving) > 1)
            for name in leaving:
                place.process(name).send_signal(signal.SIGTERM)
            codes = [await asyncio.to_thread(place.exit_code, name) for name in leaving]
            if any(codes):
                report.problems.append(f"{leaving} ended with {codes}")
            if replays := await asyncio.to_thread(lambda: place.stats(core).replays):
                break
        report.note = f"left is {', '.join(place.workers(core))}, {replays} requests moved"
        if not replays:
            report.problems.append("no request went to another worker")

    return _run(place, report, oracle, act, again=True, rests=rests)
