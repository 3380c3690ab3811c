"""`check_invariants` detects an inconsistency in each part of the scheduler's state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine_core.harness import Harness
from tests.fakes import make_record

from pagoda_engine_core.scheduling.beams import Beam
from pagoda_engine_core.scheduling.blocks import BrokenInvariant, Table
from pagoda_engine_core.scheduling.request import Choice, ChoiceState, Request
from pagoda_engine_core.scheduling.scheduler import Scheduler
from pagoda_proto.steps import TopLogprobs

Falsify = Callable[[Scheduler, Request, Choice, Choice], None]


def _set(target: str, name: str, value: object) -> Falsify:
    def falsify(scheduler: Scheduler, request: Request, running: Choice, waiting: Choice) -> None:
        setattr(
            {"request": request, "running": running, "waiting": waiting, "rows": scheduler._rows}[target], name, value
        )

    return falsify


def _repeat_a_block(scheduler: Scheduler, request: Request, running: Choice, waiting: Choice) -> None:
    scheduler._kv.groups[0].pool.share(running.tables[0].ids[:1])
    running.tables[0].ids.append(running.tables[0].ids[0])


def _swap_one_that_never_ran(scheduler: Scheduler, request: Request, running: Choice, waiting: Choice) -> None:
    waiting.swapped, waiting.num_swapped = [Table(scheduler._kv.groups[0].swap_pool.allocate(1))], 1


def _swap_everything(scheduler: Scheduler, request: Request, running: Choice, waiting: Choice) -> None:
    waiting.swapped, waiting.num_swapped = [Table(scheduler._kv.groups[0].swap_pool.allocate(2))], 8
    waiting.state = ChoiceState.PREEMPTED


FALSIFICATIONS: list[tuple[str, Falsify]] = [
    ("ref counts != block tables", _set("running", "tables", [])),
    ("appears twice", _repeat_a_block),
    ("queues != live choices", _set("running", "state", ChoiceState.FINISHED)),
    ("queued twice", lambda s, _, running, waiting: s._rows.waiting._choices.append(waiting)),
    ("out of order", _set("waiting", "order", (99.0,))),
    ("another state", _set("waiting", "state", ChoiceState.RUNNING)),
    ("it holds something", _set("waiting", "row_id", 3)),
    ("rows of a request", _set("request", "num_rows", 2)),
    ("has no row", _set("running", "row_id", -1)),
    ("beyond the block table", _set("running", "num_computed", 100)),
    ("beyond the tokens", _set("running", "num_pending", 0)),
    ("registered before computed", _set("running", "num_registered", 9)),
    ("confirmed before computed", _set("running", "num_confirmed", 99)),
    ("is swapped out", _set("running", "num_swapped", 1)),
    ("ref counts of swap blocks", lambda s, *_: s._kv.groups[0].swap_pool.allocate(1)),
    ("swap blocks != swapped tokens", _set("waiting", "num_swapped", 1)),
    ("swapped, but not preempted", _swap_one_that_never_ran),
    ("nothing is left to compute", _swap_everything),
    ("active requests", _set("rows", "num_requests", 0)),
    ("queued tokens", _set("rows", "queued_tokens", 1)),
    ("more rows than allowed", _set("rows", "max_rows", 0)),
    ("pending tokens != plans in flight", lambda s, *_: s._in_flight.clear()),
    ("an ended request is kept", lambda s, request, *_: s._requests.update(gone=_ended_request())),
]


SEARCH_FALSIFICATIONS: list[tuple[str, Callable[[Scheduler, Request], None]]] = [
    ("no choices for its beams", lambda _, request: request.search.running.append(Beam())),  # type: ignore[union-attr]
    ("not the beam in its place", lambda _, request: request.choices[0].output_ids.append(7)),
    ("another token to compute", lambda _, request: setattr(request.choices[1], "max_outputs", 9)),
    ("nobody goes on", lambda _, request: request.search._found.update({0: NAMED, 1: NAMED})),  # type: ignore[union-attr]
]
NAMED = TopLogprobs(-1.0, 1, [1], [-1.0])


@pytest.mark.parametrize(
    ("complaint", "falsify"), SEARCH_FALSIFICATIONS, ids=[name for name, _ in SEARCH_FALSIFICATIONS]
)
def test_wrong_books_of_a_search_are_seen(complaint: str, falsify: Callable[[Scheduler, Request], None]) -> None:
    harness = Harness()
    request = harness.add(make_record([1] * 8, n=2, use_beam_search=True, max_tokens=8))
    harness.step()
    harness.scheduler.check_invariants()
    falsify(harness.scheduler, request)
    with pytest.raises(BrokenInvariant, match=complaint):
        harness.scheduler.check_invariants()


def _ended_request() -> Request:
    request = Request(make_record(), max_output_tokens=8, now=0.0)
    request.abort((), 0.0)
    return request


@pytest.mark.parametrize(("complaint", "falsify"), FALSIFICATIONS, ids=[name for name, _ in FALSIFICATIONS])
def test_wrong_books_are_seen(complaint: str, falsify: Falsify) -> None:
    harness = Harness(max_rows=1, max_steps_in_flight=2, num_swap_blocks=4)
    request = harness.add(make_record([1] * 8, n=3, max_tokens=8))
    harness.plan()
    harness.plan()
    harness.scheduler.check_invariants()
    falsify(harness.scheduler, request, *request.choices[:2])
    with pytest.raises(BrokenInvariant, match=complaint):
        harness.scheduler.check_invariants()
