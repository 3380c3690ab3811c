"""The scenarios of bench/faults.py, each for a few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults import batches, scenarios
from tests.faults.failing import FAIL_FILE, POINTS
from tests.faults.scenarios import LIGHT
from tests.faults.stack import Apart, Place, apart, served
from tests.faults.streams import Outcome, Report, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with served(tmp_path_factory.mktemp("served"), *scenarios.LITTLE_ROOM) as place:
        yield place


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Apart, Path]]:
    """Tiers with functions that raise on command, and their command file."""
    directory = tmp_path_factory.mktemp("failing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAIL_FILE, str(directory / "order"))
        with apart(directory, program="tests.faults.failing") as place:
            yield place, directory / "order"


@pytest.fixture(scope="module")
def tiers(failing: tuple[Apart, Path]) -> Apart:
    """The same tiers, for tests that give no such command."""
    return failing[0]


def check(report: Report) -> None:
    assert not report.problems, "\n".join([report.line(), *report.problems])


def test_streams_go_on_under_kills(stack: Place) -> None:
    check(scenarios.kill_every(stack, seconds=6.0, count=8))


def test_one_stream_outlives_many_deaths(stack: Place) -> None:
    check(scenarios.kills_under_one_stream(stack, kills=4, max_tokens=500))


def test_an_engine_core_that_was_stopped_goes_on_with_its_worker(stack: Place) -> None:
    check(scenarios.pauses(stack, "engine-core", [5.5], load=LIGHT))


def test_a_stack_that_was_stopped_goes_on(stack: Place) -> None:
    check(scenarios.pauses(stack, "", [12.0], load=LIGHT))


def test_choices_stay_whole_under_kills(stack: Place) -> None:
    check(scenarios.many_choices(stack, count=24, gap_s=1.0, most_kills=3))


def test_a_storm_of_retries_harms_nobody_who_is_let_in(stack: Place) -> None:
    check(scenarios.storm(stack, seconds=3.0, clients=40))


def test_a_worker_behind_a_narrow_link_is_slower_and_nothing_else(tiers: Apart) -> None:
    check(scenarios.links(tiers, "worker", "throttle", times=1, hold_s=3.0, load=LIGHT))


@pytest.mark.parametrize("link", ["gateway", "worker"])
@pytest.mark.parametrize("fault", ["half-open", "blackhole", "reset", "delay"])
def test_a_bad_link_costs_no_stream(tiers: Apart, link: str, fault: str) -> None:
    hold_s = 3.0 if fault == "delay" else 6.0
    check(scenarios.links(tiers, link, fault, times=1, hold_s=hold_s, load=LIGHT))


def test_a_worker_that_nobody_stands_in_for_tells_its_streams_to_their_end(tiers: Apart) -> None:
    check(scenarios.last_worker_leaves(tiers, load=LIGHT))


def test_other_weights_take_over_nothing(tiers: Apart, tmp_path: Path) -> None:
    changed = scenarios.changed_weights(tmp_path)
    check(scenarios.stranger_takes_over_nothing(tiers, "other weights", ["--model", str(changed)], load=LIGHT))


def test_other_kernels_take_over_nothing(tiers: Apart) -> None:
    check(
        scenarios.stranger_takes_over_nothing(
            tiers, "other kernels", ["--kernels", scenarios.other_kernels()], load=LIGHT
        )
    )


def test_a_batch_goes_on(tmp_path: Path) -> None:
    check(batches.kill_everything_under_a_batch(tmp_path, lines=60, kills=1))


@pytest.fixture(scope="module")
def company(failing: tuple[Apart, Path]) -> list[Outcome]:
    """The undisturbed outcomes of the requests that run beside a failing one."""
    return undisturbed(failing[0].url, scenarios.company(0, LIGHT))


def test_a_step_without_memory_is_computed_again(failing: tuple[Apart, Path]) -> None:
    place, order = failing
    check(scenarios.one_memory_error(place, order, load=LIGHT))
    assert not order.exists()


@pytest.mark.parametrize("point", [point for points in POINTS.values() for point in points])
def test_sec_07_a_request_that_fails_fails_alone(
    failing: tuple[Apart, Path], company: list[Outcome], point: str
) -> None:
    check(scenarios.one_fails(*failing, point, company, load=LIGHT))
