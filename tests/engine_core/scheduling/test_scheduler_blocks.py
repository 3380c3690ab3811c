"""Rules about blocks, sharing between choices, log-probabilities and the ledger; test_scheduler has the other rules."""

from __future__ import annotations

import pytest
from tests.engine_core.harness import Harness, causes
from tests.fakes import make_record

from pagoda_engine_core.scheduling.blocks import BrokenInvariant
from pagoda_engine_core.scheduling.request import ChoiceState
from pagoda_proto.records import FinishReason, PriorOutput
from pagoda_proto.steps import ReplaceBlock

PROMPT = list(range(10, 20))


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_the_last_in_order_is_preempted_and_its_tokens_do_not_change() -> None:
    harness = Harness(num_blocks=8, prefix_cache=False)
    first, second = make_record([1] * 9, max_tokens=16), make_record([2] * 9, max_tokens=16)
    harness.add(first)
    harness.add(second)
    harness.drain()
    harness.check_all()
    usages = [harness.clients[record.request_id].last.usage for record in (first, second)]  # type: ignore[union-attr]
    assert [usage.preemptions for usage in usages] == [0, 1]
    assert harness.scheduler.totals.preemptions == 1
    (resumed,) = [new for plan in harness.plans[1:] for new in plan.new_rows]
    assert len(resumed.token_ids) > 9, "it brings its output along"
    assert resumed.row_id == 2, "and is a new row"


def test_priority_decides_who_is_preempted() -> None:
    harness = Harness(num_blocks=8, policy="priority")
    low, high = make_record([1] * 9, max_tokens=16, priority=3), make_record([2] * 9, max_tokens=16, priority=1)
    harness.add(low)
    harness.add(high)
    harness.drain()
    harness.check_all()
    usages = [harness.clients[record.request_id].last.usage for record in (low, high)]  # type: ignore[union-attr]
    assert usages[0].preemptions > usages[1].preemptions == 0


def test_nothing_is_started_in_a_step_that_preempts() -> None:
    harness = Harness(num_blocks=8, prefix_cache=False)
    for _ in range(2):
        harness.add(make_record([1] * 9, max_tokens=16))
    waiting = make_record([3], max_tokens=2)
    while harness.scheduler.totals.preemptions == 0:
        harness.step()
        if harness.plans[-1].step == 3:
            harness.add(waiting)
    assert harness.plans[-1].new_rows == []
    harness.drain()
    harness.check_all()


def test_nor_is_who_would_fit_into_what_was_given_up() -> None:
    """A waiting request that fits into the freed blocks goes before the preempted one, but starts a step later."""
    harness = Harness(num_blocks=8, prefix_cache=False, policy="priority")
    for level in (1, 3):
        harness.add(make_record([level] * 9, max_tokens=16, priority=level))
    while harness.scheduler.block_counts.blocks_used < 8:
        harness.step()
    harness.add(make_record([2], max_tokens=2, priority=2))
    while harness.scheduler.totals.preemptions == 0:
        harness.step()
    assert harness.plans[-1].new_rows == []
    assert [len(new.token_ids) for new in harness.step().new_rows] == [1]
    harness.drain()
    harness.check_all()


def test_a_start_leaves_room_for_what_runs() -> None:
    """The first prompt is computed in chunks; the second must not take blocks that the first still needs."""
    harness = Harness(num_blocks=7, chunk_size=4)
    harness.add(make_record([1] * 20, max_tokens=2))
    harness.add(make_record([2] * 10, max_tokens=2))
    assert len(harness.step().new_rows) == 1
    harness.drain()
    harness.check_all()
    assert harness.scheduler.totals.preemptions == 0


def test_the_first_in_line_is_not_overtaken() -> None:
    harness = Harness(num_blocks=8)
    for prompt in ([1] * 20, [2] * 20, [3]):
        harness.add(make_record(prompt, max_tokens=2))
    assert len(harness.step().new_rows) == 1
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 2)


def test_a_cached_prefix_is_not_computed_again() -> None:
    harness = Harness()
    first, second = make_record(PROMPT, max_tokens=2), make_record([*PROMPT, 1, 2], max_tokens=2)
    request = harness.request(second)
    assert harness.scheduler.matched_tokens(request) == 0
    harness.add(first)
    harness.drain()
    assert harness.scheduler.matched_tokens(request) == 8
    harness.add(second)
    (new,) = harness.step().new_rows
    assert new.num_computed == 8
    harness.drain()
    harness.check_all()
    counters, totals = harness.scheduler.block_counts, harness.scheduler.totals
    assert (totals.prompt_tokens, totals.cached_prompt_tokens, totals.output_tokens) == (22, 8, 4)
    assert harness.clients[second.request_id].last.usage.cached_prompt_tokens == 8  # type: ignore[union-attr]
    assert harness.scheduler.reset_prefix_cache() == counters.blocks_cached > 0
    assert harness.scheduler.matched_tokens(request) == 0


def test_matched_tokens_of_a_finished_request_is_none() -> None:
    harness = Harness()
    request = harness.request(make_record(PROMPT), prior=[PriorOutput(choice=0, token_ids=[], finished=True)])
    assert harness.scheduler.matched_tokens(request) == 0


def test_blocks_in_use_are_counted() -> None:
    harness = Harness(num_blocks=8)
    harness.add(make_record(PROMPT))
    assert harness.scheduler.block_counts.blocks_used == 0
    harness.step()
    assert harness.scheduler.block_counts.blocks_used == 3


def test_a_running_row_about_to_write_a_shared_block_is_given_a_copy() -> None:
    """No block that is still written is shared today, but the scheduler does not rely on that."""
    harness = Harness()
    request = harness.add(make_record(PROMPT, max_tokens=3))
    harness.step()
    table = request.choices[0].tables[0].ids
    harness.scheduler._kv.groups[0].pool.share(table[2:])
    shared = table[2]
    plan = harness.step()
    assert plan.block_copies == [(shared, table[2])]
    assert plan.replace_blocks == [ReplaceBlock(0, 2, table[2])]
    harness.scheduler._kv.groups[0].pool.free([shared])
    harness.drain()
    harness.check_all()


# --- several choices -------------------------------------------------------------------------------------------------


def test_choices_share_the_prompt_after_it_was_planned() -> None:
    harness = Harness(max_steps_in_flight=2, prefix_cache=False)
    record = make_record(PROMPT, n=3, max_tokens=4)
    harness.add(record)
    first, second = harness.plan(), harness.plan()
    assert first is not None
    assert second is not None
    (leader,) = first.new_rows
    forks = second.new_rows
    assert [(fork.choice, fork.num_computed) for fork in forks] == [(1, 9), (2, 9)]
    assert all(fork.block_ids[:2] == leader.block_ids[:2] for fork in forks)
    assert [source for source, _ in second.block_copies] == [leader.block_ids[2]] * 2
    assert [(c.num_tokens, c.sample) for c in second.chunks] == [(1, True)] * 3
    harness.drain()
    harness.check_all()
    assert harness.runner.tokens_computed == 10 + 3 + 2 * 4


def test_siblings_wait_for_a_long_prompt_without_stopping_the_line() -> None:
    harness = Harness(chunk_size=4)
    harness.add(make_record(PROMPT, n=2, max_tokens=4))
    harness.add(make_record([7], max_tokens=4))
    assert [new.choice for new in harness.step().new_rows] == [0, 0]
    harness.drain()
    harness.check_all()


def test_choices_can_run_one_after_another() -> None:
    harness = Harness(num_blocks=4, max_rows=8)
    record = make_record(PROMPT, n=4, max_tokens=7)
    harness.add(record)
    harness.drain()
    harness.check_all()
    assert harness.clients[record.request_id].reasons == [FinishReason.LENGTH] * 4


def test_two_preempted_choices_do_not_copy_from_each_other_in_one_step() -> None:
    harness = Harness(prefix_cache=False)
    request = harness.add(make_record(PROMPT, n=3, max_tokens=8))
    for _ in range(4):
        harness.step()
    for choice in request.choices[:2]:
        harness.scheduler._preempt(choice, 0.0)
    plan = harness.step()
    source = request.choices[2].tables[0].ids[2]
    assert [copy[0] for copy in plan.block_copies] == [source, source]
    assert [new.num_computed for new in plan.new_rows] == [10, 10]
    harness.drain()
    harness.check_all()


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_prompt_logprobs_are_gathered_over_chunks(chunk_size: int) -> None:
    harness = Harness(chunk_size=chunk_size)
    warm, record = make_record(PROMPT), make_record(PROMPT, n=2, prompt_logprobs=2, logprobs=1)
    harness.add(warm)
    harness.drain()
    harness.add(record)
    plan = harness.step()
    assert plan.new_rows[0].num_computed == 0, "a prefix hit would leave out log-probabilities"
    harness.drain()
    harness.check_all()
    news = [new for plan in harness.plans for new in plan.new_rows if new.choice == 1]
    assert [new.params.prompt_logprobs for new in news] == [None]


def test_a_prompt_of_one_token_has_no_prompt_logprobs_to_wait_for() -> None:
    harness = Harness()
    record = make_record([5], prompt_logprobs=0)
    harness.add(record)
    harness.drain()
    assert harness.clients[record.request_id].prompt_logprobs == [[]]


def test_prompt_logprobs_start_anew_after_preemption_before_the_first_token() -> None:
    harness = Harness(chunk_size=4)
    request = harness.add(make_record(PROMPT, prompt_logprobs=1))
    harness.step()
    assert len(request.prompt_logprobs) == 4
    harness.scheduler._preempt(request.choices[0], 0.0)
    assert request.prompt_logprobs == []
    harness.drain()
    harness.check_all()


def test_prompt_logprobs_are_not_sent_again_after_a_replay() -> None:
    harness = Harness()
    harness.add(make_record(PROMPT, prompt_logprobs=1))
    harness.step()
    harness.lose_worker()
    harness.drain()
    harness.check_all()


# --- ledger and books ------------------------------------------------------------------------------------------------


def test_the_ledger_tells_why_time_passed() -> None:
    harness = Harness(num_blocks=8, max_rows=1)
    first, second, third = (make_record(PROMPT, max_tokens=2) for _ in range(3))
    for record in (first, second, third):
        harness.add(record)
    while harness.has_work:
        harness.clock.advance(1.0)
        harness.plan()
        harness.clock.advance(10.0)
        harness.land()
    assert causes(harness.clients[first.request_id].last) == {"queued_behind": 1.0, "prefill": 10.0, "decode": 11.0}
    assert causes(harness.clients[second.request_id].last) == {
        "queued_behind": 1.0, "queued_rows": 22.0, "prefill": 10.0, "decode": 11.0,
    }  # fmt: skip
    assert causes(harness.clients[third.request_id].last) == {
        "queued_behind": 23.0, "queued_rows": 22.0, "prefill": 10.0, "decode": 11.0,
    }  # fmt: skip


def test_the_first_in_line_says_what_it_waits_for() -> None:
    blocks = Harness(num_blocks=8)
    budget = Harness(max_tokens_per_step=4)
    for harness, cause in ((blocks, "queued_blocks"), (budget, "queued_budget")):
        harness.add(make_record([1] * 20, max_tokens=2))
        waiting = harness.add(make_record([2] * 20, max_tokens=2))
        harness.step()
        assert waiting.ledger.cause == cause
        harness.drain()


def test_preemption_is_charged_until_the_next_token() -> None:
    harness = Harness()
    request = harness.add(make_record(PROMPT, max_tokens=3))
    harness.step()
    harness.scheduler._preempt(request.choices[0], harness.clock.advance(1.0))
    assert request.choices[0].state is ChoiceState.PREEMPTED
    harness.clock.advance(2.0)
    harness.plan()
    harness.clock.advance(4.0)
    harness.land()
    harness.clock.advance(8.0)
    harness.drain()
    assert causes(harness.clients[request.request_id].last) == {"decode": 9.0, "preempted": 6.0}


def test_check_invariants_sees_wrong_books() -> None:
    harness = Harness()
    request = harness.add(make_record(PROMPT, n=2))
    harness.step()
    harness.scheduler.check_invariants()
    request.num_rows = 5
    with pytest.raises(BrokenInvariant, match="rows of a request"):
        harness.scheduler.check_invariants()
