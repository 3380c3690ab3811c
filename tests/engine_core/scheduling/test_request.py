from __future__ import annotations

from typing import Any

import pytest
from tests.fakes import make_record

from pagoda_engine_core.scheduling.blocks import Table
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_engine_core.scheduling.request import Choice, ChoiceState, Ending, Request
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import Delta, FinishReason, PriorOutput, Resume
from pagoda_proto.steps import TopLogprobs


def make(
    *,
    prior: list[PriorOutput] | None = None,
    limit: int = 4,
    attempt: int = 0,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> Request:
    record = make_record([1, 2, 3], request_id="r", eos_token_ids=eos, **{"max_tokens": limit} | params)
    resume = Resume(prior_outputs=tuple(prior or ()))
    return Request(record, max_output_tokens=limit, now=10.0, attempt=attempt, resume=resume)


def emit(request: Request, *tokens: int, choice: int = 0, now: float = 11.0) -> Delta:
    """Feed tokens until one ends the choice; return the last delta."""
    for token in tokens:
        delta, ending = request.add_tokens(request.choices[choice], [token], None, now)
        if ending:
            request.finish(request.choices[choice], ending, now, delta)
    return delta


def test_tokens_are_prompt_then_output() -> None:
    request = make(prior=[PriorOutput(choice=0, token_ids=[7, 8])])
    choice = request.choices[0]
    assert choice.num_tokens == 5
    ranges = [choice.tokens(*bounds) for bounds in [(0, 5), (0, 2), (1, 4), (3, 5), (4, 4)]]
    assert ranges == [[1, 2, 3, 7, 8], [1, 2], [2, 3, 7], [7, 8], []]


def test_a_new_request_has_nothing_behind_it() -> None:
    request = make()
    assert (request.deaths, request.replays, request.preemptions, request.cached_prompt_tokens) == (0, 0, 0, 0)
    assert not any([request.started, request.resumes, request.ended, request.num_rows])


def test_first_index_counts_on_after_prior_tokens() -> None:
    request = make(prior=[PriorOutput(choice=0, token_ids=[7, 8])], attempt=2)
    delta = emit(request, 9)
    assert (delta.result.first_index, delta.result.token_ids, delta.attempt, delta.finish_reason) == (2, [9], 2, None)
    delta = emit(request, 10)
    assert (delta.result.first_index, delta.finish_reason) == (3, FinishReason.LENGTH)
    assert delta.usage is not None
    assert (delta.usage.output_tokens, delta.usage.replays) == (4, 2)


@pytest.mark.parametrize(("limit", "ends_at"), [(1, 1), (3, 3)])
def test_length_ends_a_choice(limit: int, ends_at: int) -> None:
    request = make(limit=limit)
    for count in range(1, ends_at):
        assert emit(request, count).finish_reason is None
    delta = emit(request, 99)
    assert (delta.finish_reason, delta.result.stop_token_id) == (FinishReason.LENGTH, None)
    assert delta.ends_request


def test_stop_and_eos_tokens_end_a_choice_and_count_as_output() -> None:
    for token in (5, 6):
        delta = emit(make(eos=(5,), stop_token_ids=(6,)), 9, token)
        assert (delta.finish_reason, delta.result.stop_token_id, delta.result.token_ids) == (
            FinishReason.STOP,
            token,
            [token],
        )
        assert delta.usage is not None
        assert delta.usage.output_tokens == 2


def test_stop_wins_over_length() -> None:
    assert emit(make(limit=1, eos=(5,)), 5).finish_reason is FinishReason.STOP


def test_ignore_eos_leaves_stop_tokens_in_force() -> None:
    request = make(eos=(5,), stop_token_ids=(6,), ignore_eos=True)
    assert request.eos_token_ids == ()
    assert emit(request, 5).finish_reason is None
    assert emit(request, 6).finish_reason is FinishReason.STOP


def test_nothing_stops_before_min_tokens() -> None:
    request = make(limit=8, min_tokens=2, eos=(5,))
    assert emit(request, 5, 5).finish_reason is None
    assert emit(request, 5).finish_reason is FinishReason.STOP


def test_only_the_last_choice_to_end_carries_usage_and_ledger() -> None:
    request = make(n=2, limit=2)
    delta = emit(request, 1, 2, choice=1)
    assert (delta.choice, delta.finish_reason, delta.usage, delta.ledger) == (1, FinishReason.LENGTH, None, None)
    assert not request.ended
    delta = emit(request, 1, 2, choice=0, now=13.0)
    assert request.ended
    assert delta.usage is not None
    assert delta.usage.output_tokens == 4
    assert delta.ledger is not None
    assert sum(entry.seconds for entry in delta.ledger) == 3.0


def test_a_prior_choice_that_ended_unseen_gets_its_ending() -> None:
    for tokens, reason, stop in [([9, 5], FinishReason.STOP, 5), ([1, 2, 3, 4], FinishReason.LENGTH, None)]:
        (delta,) = make(prior=[PriorOutput(choice=0, token_ids=tokens)], eos=(5,)).settle(12.0)
        assert (delta.finish_reason, delta.result.stop_token_id, delta.result.token_ids) == (reason, stop, [])
        assert delta.result.first_index == len(tokens)
        assert delta.ends_request


def test_a_finished_prior_choice_is_not_told_again() -> None:
    request = make(n=2, prior=[PriorOutput(choice=0, token_ids=[9], finished=True)])
    assert request.settle(12.0) == []
    assert [choice.state for choice in request.choices] == [ChoiceState.FINISHED, ChoiceState.WAITING]
    last = emit(request, 1, 2, 3, 4, choice=1)
    assert last.ends_request
    assert last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([9, 5], FinishReason.STOP), ([1, 2, 3, 4], FinishReason.LENGTH), ([9], FinishReason.ABORT)],
)
def test_a_request_that_came_finished_gets_exactly_one_ending(tokens: list[int], reason: FinishReason) -> None:
    prior = [PriorOutput(choice=i, token_ids=tokens, finished=True) for i in range(2)]
    request = make(n=2, prior=prior, eos=(5,))
    (delta,) = request.settle(12.0)
    assert delta.ends_request
    assert (delta.choice, delta.result.token_ids, delta.finish_reason) == (1, [], reason)
    assert delta.usage is not None
    assert delta.usage.output_tokens == 2 * len(tokens)


def test_the_record_s_own_lists_are_left_alone() -> None:
    prior = PriorOutput(choice=0, token_ids=[7])
    request = make(prior=[prior])
    emit(request, 8)
    assert prior.token_ids == [7]
    assert request.record.prompt_token_ids == [1, 2, 3]


def test_abort_and_fail_end_live_choices_only() -> None:
    request = make(n=3)
    (delta,) = request.abort([1, 7], 11.0)
    assert (delta.choice, delta.finish_reason, delta.usage) == (1, FinishReason.ABORT, None)
    deltas = request.fail(ErrorCode.INTERNAL, "broken", 12.0)
    assert [(d.choice, d.finish_reason, d.error_code, d.error_message) for d in deltas] == [
        (0, FinishReason.ERROR, ErrorCode.INTERNAL, "broken"),
        (2, FinishReason.ERROR, ErrorCode.INTERNAL, "broken"),
    ]
    assert [d.ends_request for d in deltas] == [False, True]
    assert request.abort([], 13.0) == request.fail(ErrorCode.INTERNAL, "again", 13.0) == []


def test_prompt_logprobs_leave_with_the_first_token_of_choice_0_only() -> None:
    request = make(n=2, prompt_logprobs=1)
    entry = TopLogprobs(-1.0, 1, [1], [-1.0])
    request.prompt_logprobs = [entry]
    assert emit(request, 5, choice=1).result.prompt_logprobs is None
    assert emit(request, 5).result.prompt_logprobs == [entry]
    assert emit(request, 6).result.prompt_logprobs is None
    assert not request.choices[0].owes_prompt_logprobs


def test_prompt_logprobs_are_not_owed_after_a_replay_that_brought_tokens() -> None:
    assert make(prompt_logprobs=1).choices[0].owes_prompt_logprobs
    assert not make(prompt_logprobs=1, prior=[PriorOutput(choice=0, token_ids=[1])]).choices[0].owes_prompt_logprobs


def test_leaving_the_worker_forgets_everything_but_tokens() -> None:
    request = make(prompt_logprobs=1)
    choice: Choice = request.choices[0]
    choice.row_id, choice.tables, choice.num_computed, choice.num_pending, choice.launched = 4, [Table([1])], 3, 1, True
    request.prompt_logprobs.append(TopLogprobs(-1.0, 1, [], []))
    choice.leave_worker(ChoiceState.PREEMPTED)
    assert (choice.row_id, choice.tables, choice.num_computed, choice.num_pending) == (-1, [], 0, 0)
    assert (choice.state, choice.launched) == (ChoiceState.PREEMPTED, False)
    assert request.prompt_logprobs == []


def test_distance_counts_tokens_of_steps_in_flight_and_stops_at_the_limit() -> None:
    choice = make(limit=2).choices[0]
    assert choice.distance == 3
    choice.num_computed, choice.num_pending = 3, 1
    assert choice.distance == 1
    choice.num_computed, choice.num_pending = 4, 2
    assert choice.distance == 0


def test_the_ledger_names_the_most_advanced_choice() -> None:
    request = make(n=2)
    assert request.ledger.cause is Cause.QUEUED_NO_WORKER
    request.note_blocked(Cause.QUEUED_ROWS, 11.0)
    assert request.ledger.cause is Cause.QUEUED_ROWS
    request.note_row(2, 12.0)
    request.note_row(9, 12.0)
    assert (request.ledger.cause, request.cached_prompt_tokens, request.started) == (Cause.PREFILL, 2, True)
    request.num_rows = 1
    request.note_blocked(Cause.QUEUED_ROWS, 13.0)
    assert request.ledger.cause is Cause.PREFILL
    emit(request, 5)
    assert request.ledger.cause is Cause.DECODE
    request.num_rows = 0
    request.note_idle(14.0)
    assert request.ledger.cause is Cause.QUEUED_BEHIND
    request.note_row(0, 15.0)
    request.choices[0].state = ChoiceState.PREEMPTED
    request.note_idle(16.0)
    request.note_blocked(Cause.QUEUED_BLOCKS, 17.0)
    request.note_row(0, 17.0)
    assert request.ledger.cause is Cause.PREEMPTED, "computing again is part of having been preempted"
    request.ledger.enter(Cause.REPLAYING, 18.0)
    request.note_idle(19.0)
    assert request.ledger.cause is Cause.REPLAYING


def test_endings_can_be_told_in_a_token_s_own_delta() -> None:
    request = make()
    delta, _ = request.add_tokens(request.choices[0], [9], None, 11.0)
    assert request.finish(request.choices[0], Ending(FinishReason.ABORT), 11.0, delta) is delta
    assert (delta.result.token_ids, delta.finish_reason) == ([9], FinishReason.ABORT)
