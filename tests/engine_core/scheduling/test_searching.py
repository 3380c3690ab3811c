"""Beam search in the scheduler: which blocks beams share, when they wait, and how a search ends. The fake worker checks
every cell of every block; test_scheduler_properties mixes searches with other requests."""

from __future__ import annotations

import pytest
from tests.effort import num_calls
from tests.engine_core.harness import Harness
from tests.fakes import make_record

from pagoda_engine_core.scheduling.request import Request
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason, RequestRecord

PROMPT = list(range(10, 20))  # two and a half blocks


def search(prompt: list[int] = PROMPT, **params: object) -> RequestRecord:
    return make_record(prompt, **({"n": 3, "use_beam_search": True, "max_tokens": 6} | params))  # type: ignore[arg-type]


def finished(harness: Harness) -> Harness:
    harness.drain()
    harness.check_all()
    return harness


def test_beams_share_what_they_have_in_common_and_copy_what_they_write() -> None:
    harness = Harness()
    request = harness.add(search())
    first, second = harness.step(), harness.step()
    (root,) = first.new_rows
    assert second.finished_rows == [root.row_id]
    assert [new.block_ids[:2] for new in second.new_rows] == [root.block_ids[:2]] * 3
    assert len({new.block_ids[2] for new in second.new_rows}) == 3
    partly = root.block_ids[2]
    assert [source for source, _ in second.block_copies] == [partly, partly]  # the last beam needs no copy
    assert partly in [new.block_ids[2] for new in second.new_rows]
    assert [new.num_computed for new in second.new_rows] == [10, 10, 10]
    assert harness.runner.tokens_computed == 13
    finished(harness)
    assert harness.runner.tokens_computed == 10 + 5 * 3, "no token is computed twice"
    assert harness.clients[request.request_id].last is not None


def test_the_blocks_of_a_long_prompt_cost_a_step_nothing() -> None:
    calls = []
    for num_blocks in (3, 30):
        harness = Harness()
        harness.add(search([i % 7 for i in range(4 * num_blocks + 2)]))
        for _ in range(2):
            harness.step()
        harness.plan()
        calls.append(num_calls(harness.land))
        finished(harness)
    assert calls[1] < calls[0] + 27, "fewer than one for each block"


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_search_that_moves_finds_what_it_would_have_found(steps: int) -> None:
    undisturbed, harness = Harness(), Harness()
    record = search()
    undisturbed.add(record)
    finished(undisturbed)
    request = harness.add(record)
    for _ in range(steps):
        harness.step()
    harness.plan()
    harness.move(request)
    finished(harness)
    assert harness.clients[record.request_id].tokens == undisturbed.clients[record.request_id].tokens


def test_one_beam_goes_on_in_its_own_blocks() -> None:
    harness = Harness()
    harness.add(search(n=1))
    harness.drain()
    assert not [plan for plan in harness.plans if plan.block_copies]
    harness.check_all()


def test_nothing_is_told_before_the_end_and_all_is_told_with_it() -> None:
    harness = Harness()
    record = search(logprobs=2)
    request = harness.add(record)
    told = []
    while not told:
        harness.plan()
        told = harness.land()
    assert [delta.choice for delta in told] == [0, 1, 2]
    assert all(delta.finish_reason is FinishReason.LENGTH for delta in told)
    assert [delta.tokens.begun is not None for delta in told] == [True, False, False]
    assert all(len(delta.tokens.logprobs or ()) == 6 for delta in told)
    assert told[-1].usage is not None
    assert (told[-1].usage.output_tokens, request.num_output_tokens) == (18, 18)
    assert harness.scheduler.totals.output_tokens == 1 + 5 * 3  # computed tokens: the first is shared
    finished(harness)


def test_two_steps_in_flight_wait_for_what_is_found() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(search())
    assert harness.plan() is not None
    assert harness.plan() is None
    harness.add(make_record([5, 6], max_tokens=4))  # other requests continue meanwhile
    assert harness.plan() is not None
    finished(harness)


@pytest.mark.parametrize("shape", [{"max_rows": 1}, {"max_rows": 2}, {"num_blocks": 4}, {"num_blocks": 5}])
@pytest.mark.parametrize("swap", [{}, {"num_swap_blocks": 6, "preemption": "swap"}])
def test_beams_that_find_no_room_together_go_one_after_the_other(
    shape: dict[str, int], swap: dict[str, object]
) -> None:
    harness = Harness(**shape, **swap)  # type: ignore[arg-type]
    for prompt in (PROMPT, PROMPT[:3]):
        harness.add(search(prompt))
    finished(harness)
    assert harness.scheduler.totals.preemptions


def test_two_searches_that_hold_what_the_other_needs_do_not_wait_for_ever() -> None:
    harness = Harness(max_rows=4, max_steps_in_flight=2)
    for prompt in (PROMPT, PROMPT[:3], PROMPT[::-1]):
        harness.add(search(prompt, n=4))
    finished(harness)


def test_a_preempted_beam_keeps_what_was_found() -> None:
    harness = Harness(prefix_cache=False, num_swap_blocks=16, preemption="swap")
    request = harness.add(search())
    harness.step()
    harness.scheduler._preempt(request.choices[2], harness.clock())
    harness.step()  # runs the other two beams
    harness.scheduler._preempt(request.choices[0], harness.clock())  # candidates known; heirs share its swap blocks
    harness.scheduler.check_invariants()
    finished(harness)
    assert harness.scheduler.totals.swap_preemptions == 2
    assert harness.runner.tokens_computed == 10 + 5 * 3, "no token is computed twice"


@pytest.mark.parametrize("after", range(1, 6))
def test_a_lost_worker_costs_nothing_that_was_found(after: int) -> None:
    harness = Harness(max_rows=2)
    record = search()
    harness.add(record)
    for _ in range(after):
        harness.step()
    harness.lose_worker()
    finished(harness)
    last = harness.clients[record.request_id].last
    assert last is not None
    assert last.usage is not None
    assert last.usage.replays == 1


def test_a_search_is_stopped_whole_or_not_at_all() -> None:
    harness = Harness()
    record = search()
    harness.add(record)
    harness.step()
    assert harness.scheduler.abort(record.request_id, (1,), harness.clock()) == []
    deltas = harness.scheduler.abort(record.request_id, (0, 1, 2), harness.clock())
    assert [(delta.choice, delta.finish_reason) for delta in deltas] == [(i, FinishReason.ABORT) for i in range(3)]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.output_tokens == 0
    harness.receive(deltas)
    finished(harness)


def test_rows_of_one_search_that_fail_in_one_step_end_it_once() -> None:
    harness = Harness(poison_token_id=15, poison_at=1)
    record = search()
    harness.add(record)
    harness.drain()
    client = harness.clients[record.request_id]
    assert client.reasons == [FinishReason.ERROR] * 3
    assert client.tokens == [[], [], []]


def test_a_row_that_names_nothing_breaks_the_protocol() -> None:
    harness = Harness()
    harness.add(search())
    plan = harness.plan()
    assert plan is not None
    (result,) = harness.results
    result.outputs[0].logprobs[0].top_ids.clear()  # type: ignore[index]
    with pytest.raises(PagodaError, match="must name what may follow") as error:
        harness.land()
    assert error.value.code is ErrorCode.PROTOCOL_ERROR


def test_a_resubmitted_search_begins_anew() -> None:
    harness = Harness()
    record = search()
    harness.add(record)
    finished(harness)
    client = harness.clients[record.request_id]
    prior = client.prior()[:2]
    request = harness.request(record, attempt=1, prior=prior)
    assert [choice.live for choice in request.choices] == [True] * 3
    assert harness.scheduler.add(request, harness.clock()) == []
    told = []
    while not told:
        harness.plan()
        told = harness.apply(harness.results.popleft())
    assert [delta.tokens.token_ids for delta in told] == client.tokens


def test_beams_beside_streams_take_a_token_each() -> None:
    harness = Harness()
    stream: Request = harness.add(make_record([7] * 3, max_tokens=9))
    harness.add(search())
    harness.step()
    assert harness.step().num_rows == 4
    finished(harness)
    assert len(harness.clients[stream.request_id].tokens[0]) == 9
