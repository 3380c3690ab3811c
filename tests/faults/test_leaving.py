"""With two of everything, one process leaves: every answer must equal the one of an undisturbed stack."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from tests.faults import leaving
from tests.faults.doubled import Doubled, doubled
from tests.faults.leaving import Oracle
from tests.faults.proxy import FAULTS
from tests.faults.soak import KILL, LINKS, PROCESSES, STOP, TERM, faults, soak
from tests.faults.streams import Flow, Report
from tests.faults.variants import disturbed, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doubled]:
    with doubled(tmp_path_factory.mktemp("doubled")) as place:
        yield place


@pytest.fixture(scope="module")
def oracle(place: Doubled) -> Oracle:
    """Short requests suffice: faults are injected after a few tokens of each stream."""
    return asyncio.run(undisturbed(place.urls, max_tokens=200))


SEED = 0


def check(report: Report) -> None:
    assert not report.problems, "\n".join([report.line(), *report.problems])


@pytest.mark.parametrize("name", ["core-0-a", "core-0", "gateway-0"])
def test_who_is_asked_to_leave_takes_nothing_along(place: Doubled, oracle: Oracle, name: str) -> None:
    """SIGTERM for an engine core's only worker, an engine core and a gateway."""
    check(leaving.asked_to_leave(place, name, oracle))


def test_workers_come_and_go(place: Doubled, oracle: Oracle) -> None:
    """Streams repeat while the new workers start, so half of the requests suffice."""
    check(leaving.scaled(place, oracle[::2], letters="bc", rests=True))


def test_a_gateway_that_is_killed_breaks_no_stream(place: Doubled, oracle: Oracle) -> None:
    check(leaving.killed(place, "gateway-0", leaving.streams_of(oracle)))


def test_a_gateway_that_stands_still_breaks_no_stream(place: Doubled, oracle: Oracle) -> None:
    check(leaving.stopped(place, "gateway-0", leaving.streams_of(oracle), seconds=4.0))


def test_answers_stay_whole_while_one_thing_after_another_goes_wrong(place: Doubled, oracle: Oracle) -> None:
    """A short version of `make soak`."""
    check(soak(place, oracle[::2], 8.0, seed=SEED))


def test_one_seed_makes_one_list_of_faults_of_every_kind() -> None:
    first, again, other = (list(itertools.islice(faults(seed), 300)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.what for fault in first} == {KILL, TERM, STOP, *FAULTS}
    assert {fault.target for fault in first} == {*PROCESSES, *LINKS}
    assert all(fault.target in LINKS for fault in first if fault.what in FAULTS)


def test_the_judge_sees_a_stream_that_broke_and_one_that_is_another(place: Doubled, oracle: Oracle) -> None:
    report = Report("")
    swapped = [
        (oracle[0][0] | {"seed": 1, "temperature": 1.5}, oracle[0][1]),
        (oracle[1][0] | {"max_tokens": -1}, oracle[1][1]),
    ]

    async def nothing(flow: Flow) -> None:
        await flow.more(1)

    asyncio.run(disturbed(place.urls, swapped, nothing, report))
    assert report.kinds == {"different": 1, "broken": 1}
    assert len(report.problems) == 2
