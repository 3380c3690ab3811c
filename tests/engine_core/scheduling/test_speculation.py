"""Draft tokens fill the rest of a step: the same tokens in fewer steps, at no other request's expense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_core.harness import Harness
from tests.fakes import FakeModel, FakeRow, make_record, reference_outputs, reference_tokens

from pagoda_engine_core.config import EngineConfig
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason
from pagoda_proto.steps import Chunk, RowOutput, StepResult, TopLogprobs

PROMPT = list(range(10, 20))
EIGHT: dict[str, Any] = {"hint": lambda row: 8}
ALL = EIGHT | {"accept": lambda row, allowed: allowed}
NONE = EIGHT | {"accept": lambda row, allowed: 0}


def drafts(harness: Harness) -> list[list[int]]:
    """For each plan with chunks, the number of drafts allowed to each chunk."""
    return [[chunk.num_drafts for chunk in plan.chunks] for plan in harness.plans if plan.chunks]


def test_drafts_that_hold_save_steps() -> None:
    harness = Harness(**ALL)
    record = make_record(PROMPT, max_tokens=20, logprobs=1)
    harness.add(record)
    first, second = harness.step(), harness.step()
    assert first.chunks == [Chunk(0, 0, 10, True)], "a prompt carries no drafts"
    assert second.chunks == [Chunk(0, 10, 1, True, 8)]
    assert harness.step().chunks == [Chunk(0, 19, 1, True, 8)], "nine tokens further"
    harness.drain()
    harness.check_all()
    assert drafts(harness) == [[0], [8], [8], [0]], "none beyond the last token there can be"
    totals = harness.scheduler.totals
    assert (totals.draft_tokens, totals.accepted_draft_tokens, totals.output_tokens) == (16, 16, 20)


def test_drafts_that_fail_cost_no_token() -> None:
    harness = Harness(**NONE)
    harness.add(make_record(PROMPT, max_tokens=5))
    harness.drain()
    harness.check_all()
    assert drafts(harness) == [[0], [3], [2], [1], [0]]
    totals = harness.scheduler.totals
    assert (totals.draft_tokens, totals.accepted_draft_tokens, totals.output_tokens) == (6, 0, 5)


def test_a_delta_carries_all_tokens_that_held() -> None:
    harness = Harness(**ALL)
    record = make_record(PROMPT, max_tokens=12, logprobs=2)
    harness.add(record)
    harness.step()
    harness.plan()
    (delta,) = harness.land()
    assert (delta.result.first_index, len(delta.result.token_ids), len(delta.result.logprobs or ())) == (1, 9, 9)
    harness.drain()
    harness.check_all()


@pytest.mark.parametrize("place", [1, 4, 7])
def test_what_follows_the_token_that_ends_a_choice_is_dropped(place: int) -> None:
    plain = reference_tokens(make_record(PROMPT, max_tokens=20))[0]
    harness = Harness(**ALL)
    record = make_record(PROMPT, max_tokens=20, stop_token_ids=(plain[place],), logprobs=0)
    harness.add(record)
    harness.drain()
    harness.check_all()
    client = harness.clients[record.request_id]
    assert client.tokens == [plain[: plain.index(plain[place]) + 1]]
    assert client.reasons == [FinishReason.STOP]
    assert len([plan for plan in harness.plans if plan.chunks]) == 2


def test_no_ending_before_min_tokens() -> None:
    harness = Harness(**ALL)
    record = make_record(PROMPT, max_tokens=30, min_tokens=6, stop_token_ids=tuple(range(0, 256, 3)))
    harness.add(record)
    harness.drain()
    harness.check_all()
    assert len(harness.clients[record.request_id].tokens[0]) > 6


# --- what drafts are granted from ------------------------------------------------------------------------------------


def test_few_rows_share_what_is_left_of_the_step() -> None:
    harness = Harness(**ALL, speculation_tokens=12)
    for i in range(3):
        harness.add(make_record([i + 1, 2, 3], max_tokens=30))
    harness.step()
    assert [chunk.num_drafts for chunk in harness.step().chunks] == [3, 3, 3]
    harness.drain()
    harness.check_all()


def test_a_row_that_wants_less_leaves_more_to_the_next() -> None:
    harness = Harness(hint=lambda row: 1 if row.new.row_id == 0 else 8, speculation_tokens=12, **{"accept": min_one})
    for i in range(3):
        harness.add(make_record([i + 1, 2, 3], max_tokens=30))
    harness.step()
    assert [chunk.num_drafts for chunk in harness.step().chunks] == [1, 4, 4]
    harness.drain()
    harness.check_all()


def min_one(row: FakeRow, allowed: int) -> int:
    return min(1, allowed)


@pytest.mark.parametrize(("rows", "limit"), [(4, 4), (5, 4), (1, 1), (1, 0)])
def test_a_step_with_many_rows_has_no_drafts_and_stays_pipelined(rows: int, limit: int) -> None:
    harness = Harness(**ALL, speculation_tokens=limit, max_steps_in_flight=2)
    for i in range(rows):
        harness.add(make_record([i + 1, 2, 3], max_tokens=10))
    harness.plan()
    harness.plan()
    for _ in range(5):
        harness.land()
        assert harness.plan() is not None, "a hint that comes to nothing makes nobody wait"
    harness.drain()
    harness.check_all()
    assert not any(map(sum, drafts(harness)))


def test_a_step_with_a_prompt_has_no_drafts() -> None:
    harness = Harness(**ALL, chunk_size=8)
    harness.add(make_record([1, 2], max_tokens=60))
    harness.step()
    harness.add(make_record([3] * 40, max_tokens=2))
    plans = [harness.step() for _ in range(6)]
    assert [sum(chunk.num_drafts for chunk in plan.chunks) for plan in plans[:5]] == [0] * 5
    assert any(chunk.num_drafts for chunk in plans[5].chunks), "after the prompt they are back"
    harness.drain()
    harness.check_all()


def test_a_request_that_waits_ends_drafting() -> None:
    harness = Harness(**ALL, max_rows=1)
    harness.add(make_record(PROMPT, max_tokens=20))
    harness.step()
    harness.add(make_record(PROMPT, max_tokens=20))
    assert harness.step().chunks == [Chunk(0, 10, 1, True)]
    harness.drain()
    harness.check_all()


def test_drafts_keep_to_the_budget_of_the_step() -> None:
    harness = Harness(**ALL, max_tokens_per_step=4)
    harness.add(make_record([1, 2], max_tokens=20))
    harness.step()
    assert harness.step().chunks == [Chunk(0, 2, 1, True, 3)]
    harness.drain()
    harness.check_all()


def test_drafts_never_preempt() -> None:
    """Two rows need the whole pool together. Without drafts neither is preempted, so drafts must not change that."""
    harness = Harness(**ALL, num_blocks=10, prefix_cache=False)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        harness.add(make_record(prompt, max_tokens=18))
    harness.drain()
    harness.check_all()
    assert harness.scheduler.totals.preemptions == 0
    assert any(map(sum, drafts(harness)))


def test_without_spare_blocks_drafts_end_where_the_block_ends() -> None:
    harness = Harness(**ALL, num_blocks=3)
    harness.add(make_record([1, 2, 3, 4, 5], max_tokens=7))
    harness.step()
    assert harness.step().chunks == [Chunk(0, 5, 1, True, 2)], "a third block is there, but it is to go on with"
    assert harness.step().chunks == [Chunk(0, 8, 1, True, 2)]
    harness.drain()
    harness.check_all()


# --- steps in flight -------------------------------------------------------------------------------------------------


def test_a_hint_waits_for_the_step_in_flight() -> None:
    harness = Harness(**ALL, max_steps_in_flight=2)
    harness.add(make_record(PROMPT, max_tokens=40))
    assert harness.plan()
    assert harness.plan(), "nothing is known of drafts yet"
    harness.land()
    assert harness.plan() is None
    assert harness.has_work
    harness.land()
    plan = harness.plan()
    assert plan is not None
    assert plan.chunks == [Chunk(0, 11, 1, True, 8)]
    assert harness.plan() is None, "its own result is needed before the row can go on"
    harness.drain()
    harness.check_all()


def test_a_new_request_starts_beside_drafts_in_flight() -> None:
    harness = Harness(**ALL, max_steps_in_flight=2)
    harness.add(make_record(PROMPT, max_tokens=40))
    harness.step()
    harness.plan()
    harness.add(make_record([1, 2, 3], max_tokens=4))
    plan = harness.plan()
    assert plan is not None
    assert plan.chunks == [Chunk(1, 0, 3, True)]
    harness.drain()
    harness.check_all()


def test_a_row_without_a_hint_goes_along_with_those_that_have_one() -> None:
    harness = Harness(hint=lambda row: 4 * (row.new.row_id == 0), accept=ALL["accept"], max_steps_in_flight=2)
    for i in range(2):
        harness.add(make_record([i + 1, 2], max_tokens=30))
    harness.drain()
    harness.check_all()
    assert all(len(plan.chunks) == 2 for plan in harness.plans[:5]), "weights are read once for both"


@pytest.mark.parametrize("how", ["abort", "preempt", "lose"])
def test_a_row_may_go_while_its_drafts_are_in_flight(how: str) -> None:
    harness = Harness(**ALL, num_blocks=12)
    first = make_record([1, 2, 3], max_tokens=24)
    harness.add(first)
    harness.step()
    harness.step()
    harness.plan()
    if how == "abort":
        harness.receive(harness.scheduler.abort(first.request_id, (), harness.clock()))
    elif how == "lose":
        harness.lose_worker()
    else:
        harness.scheduler._preempt(harness.scheduler._rows.running[0], harness.clock())
    harness.scheduler.check_invariants()
    if harness.results:
        assert harness.land() == []
    harness.drain()
    harness.check_all()


def test_only_tokens_that_held_enter_the_prefix_cache() -> None:
    """The drafts reach into the fourth block, but the accepted ones only fill the second."""
    harness = Harness(hint=lambda row: 7, accept=lambda row, allowed: min(2, allowed))
    record = make_record([1, 2, 3, 4, 5], max_tokens=16)
    request = harness.add(record)
    harness.step()
    harness.step()
    (choice,) = request.choices
    assert (choice.num_computed, choice.num_registered, len(choice.tables[0].ids)) == (8, 2, 4)
    harness.drain()
    again = make_record(record.prompt_token_ids + harness.clients[record.request_id].tokens[0], max_tokens=4)
    harness.add(again)
    harness.drain()
    harness.check_all()
    assert harness.clients[again.request_id].last.usage.cached_prompt_tokens == 20  # type: ignore[union-attr]


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output",
    [
        RowOutput(0, [1] * 5, num_drafted=3),
        RowOutput(0, [1] * 3, num_drafted=1),
        RowOutput(0, [1] * 2, num_drafted=9),
        RowOutput(0, [], num_drafted=3),
        RowOutput(0, [1, -1], num_drafted=3),
        RowOutput(0, [1], num_drafted=-1),
        RowOutput(0, [1], num_drafted=0, num_drafts=-1),
    ],
)
def test_a_result_with_impossible_drafts_changes_nothing(output: RowOutput) -> None:
    harness = Harness(**ALL)
    harness.add(make_record(PROMPT, max_tokens=30))
    harness.step()
    harness.plan()
    with pytest.raises(PagodaError) as caught:
        harness.apply(StepResult(step=2, outputs=[output]))
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR
    harness.drain()
    harness.check_all()


def test_every_token_has_its_log_probability() -> None:
    harness = Harness(**ALL)
    harness.add(make_record(PROMPT, max_tokens=30, logprobs=0))
    harness.step()
    harness.plan()
    output = RowOutput(0, [1, 2], [TopLogprobs(0.0, 1, [], [])], num_drafted=3)
    with pytest.raises(PagodaError, match="log-probabilities"):
        harness.apply(StepResult(step=2, outputs=[output]))


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="speculation_tokens must be between 0 and 65536, got -1"):
        EngineConfig(speculation_tokens=-1)


@given(
    hints=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    accepts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    rows=st.integers(1, 5),
    depth=st.integers(1, 3),
    num_blocks=st.integers(9, 40),
    n=st.integers(1, 3),
)
def test_whatever_holds_the_tokens_are_those_of_plain_decoding(
    hints: list[int], accepts: list[int], rows: int, depth: int, num_blocks: int, n: int
) -> None:
    harness = Harness(
        hint=lambda row: hints[row.num_outputs % len(hints)],
        accept=lambda row, allowed: min(allowed, accepts[row.num_outputs % len(accepts)]),
        model=FakeModel(vocab_size=32),
        num_blocks=num_blocks,
        max_steps_in_flight=depth,
    )
    records = [make_record([i, 2, 3, 4, 5], n=n, max_tokens=28, stop_token_ids=(i,)) for i in range(rows)]
    for record in records:
        harness.add(record)
    harness.drain()
    harness.check_all()
    for record in records:
        expected = reference_outputs(record, FakeModel(vocab_size=32))
        assert harness.clients[record.request_id].tokens == [choice.token_ids for choice in expected]
