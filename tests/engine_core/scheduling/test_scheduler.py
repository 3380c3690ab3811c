"""One test per scheduling rule; test_scheduler_properties tests them in combination."""

from __future__ import annotations

import msgspec
import pytest
from tests.engine_core.harness import Harness, causes
from tests.fakes import FakeModel, make_record, reference_tokens

from pagoda_engine_core.scheduling import plan
from pagoda_engine_core.scheduling.ledger import Cause
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason, PriorOutput
from pagoda_proto.steps import AppendBlocks, Chunk, RowError, RowOutput, StepResult, TopLogprobs

PROMPT = list(range(10, 20))


# --- the chase -------------------------------------------------------------------------------------------------------


def test_a_request_runs_from_prompt_to_length() -> None:
    harness = Harness()
    record = make_record(PROMPT, max_tokens=3)
    harness.add(record)
    plan = harness.step()
    (new,) = plan.new_rows
    assert (new.token_ids, new.num_prompt_tokens, new.num_computed, len(new.block_ids)) == (PROMPT, 10, 0, 3)
    assert (new.params, new.seed, new.choice) == (record.task.params, record.task.seed, 0)
    assert plan.chunks == [Chunk(new.row_id, 0, 10, True)]
    assert harness.step().chunks == [Chunk(new.row_id, 10, 1, True)]
    assert harness.step().chunks == [Chunk(new.row_id, 11, 1, True)]
    harness.drain()
    assert harness.clients[record.request_id].tokens == reference_tokens(record)
    harness.check_all()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_request_that_moves_leaves_nothing_behind_and_goes_on_with_its_tokens(steps: int) -> None:
    """Also a request with a step in flight, whose result is then ignored."""
    harness = Harness()
    records = [make_record(PROMPT, max_tokens=8, n=2, seed=3), make_record(PROMPT[:3], max_tokens=8)]
    requests = [harness.add(record) for record in records]
    for _ in range(steps):
        harness.step()
    harness.plan()
    for request in requests:
        harness.move(request)
    harness.drain()
    for record in records:
        assert harness.clients[record.request_id].tokens == reference_tokens(record)
    harness.check_all()


def test_decoding_sends_changes_only() -> None:
    harness = Harness()
    harness.add(make_record(PROMPT, max_tokens=8))
    first = harness.step()
    plans = [harness.step() for _ in range(4)]
    assert all(plan.new_rows == plan.finished_rows == plan.block_copies == [] for plan in plans)
    appended = [append for plan in plans for append in plan.append_blocks]
    (append,) = appended  # positions 10 to 13 cross one block boundary
    assert append == AppendBlocks(first.new_rows[0].row_id, append.block_ids)
    assert len(append.block_ids) == 1


def test_steps_count_up_and_the_last_plan_only_drops_rows() -> None:
    harness = Harness()
    harness.add(make_record(PROMPT, max_tokens=2))
    assert [harness.step().step for _ in range(2)] == [1, 2]
    assert harness.has_work
    plan = harness.step()
    assert (plan.step, plan.finished_rows, plan.chunks) == (3, [0], [])
    assert not harness.has_work
    assert harness.plan() is None


def test_a_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    harness = Harness(chunk_size=4)
    harness.add(make_record(PROMPT, max_tokens=1))
    chunks = [harness.step().chunks[0] for _ in range(3)]
    assert [(c.start, c.num_tokens, c.sample) for c in chunks] == [(0, 4, False), (4, 4, False), (8, 2, True)]


def test_decodes_have_their_tokens_before_any_prompt() -> None:
    harness = Harness(max_tokens_per_step=6)
    long, short = make_record([1] * 20, max_tokens=2), make_record([2], max_tokens=8)
    harness.add(long)
    harness.step()
    harness.add(short)
    harness.clock.advance(1)
    for _ in range(2):  # the long prompt came first and takes the whole budget
        assert [c.num_tokens for c in harness.step().chunks] == [6]
    plan = harness.step()
    assert [(c.row_id, c.num_tokens, c.sample) for c in plan.chunks] == [(1, 1, True), (0, 2, True)]
    third = make_record([3] * 20, max_tokens=2)
    harness.add(third)
    plan = harness.step()
    assert [c.num_tokens for c in plan.chunks] == [1, 1, 4], "decodes first, the prompt has the rest"
    harness.drain()
    harness.check_all()


def test_running_rows_go_before_waiting_ones() -> None:
    harness = Harness(max_tokens_per_step=8, policy="priority")
    harness.add(make_record([1] * 20, priority=0))
    harness.step()
    harness.add(make_record([2] * 20, priority=-1))
    assert [c.row_id for c in harness.step().chunks] == [0]


def test_more_decodes_than_tokens_serves_them_in_order() -> None:
    harness = Harness(max_tokens_per_step=2)
    for _ in range(3):
        harness.add(make_record([1], max_tokens=4))
    harness.drain()
    harness.check_all()
    assert max(len(plan.chunks) for plan in harness.plans) == 2


def test_no_more_rows_than_allowed() -> None:
    harness = Harness(max_rows=2)
    for _ in range(5):
        harness.add(make_record(PROMPT, max_tokens=3))
    harness.step()
    assert (harness.scheduler.num_rows, harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 2, 3)
    assert harness.scheduler.queued_tokens == 30
    harness.drain()
    harness.check_all()


# --- steps in flight -------------------------------------------------------------------------------------------------


def test_the_next_step_is_planned_on_a_token_nobody_knows_yet() -> None:
    harness = Harness(max_steps_in_flight=3)
    harness.add(make_record(PROMPT, max_tokens=3))
    starts = [plan.chunks[0].start for plan in (harness.plan(), harness.plan(), harness.plan()) if plan]
    assert starts == [10 - 10, 10, 11]
    assert harness.scheduler.steps_in_flight == 3
    assert not harness.has_work, "the last token there can be is being sampled"
    harness.drain()
    harness.check_all()


def test_no_chunk_is_planned_beyond_the_last_token() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_record(PROMPT, max_tokens=1))
    assert harness.plan() is not None
    assert harness.plan() is None


def test_planning_more_steps_than_allowed_is_an_error() -> None:
    harness = Harness(max_steps_in_flight=1)
    harness.add(make_record(PROMPT))
    harness.plan()
    with pytest.raises(PagodaError, match="in flight") as caught:
        harness.scheduler.schedule(0.0)
    assert caught.value.code is ErrorCode.INTERNAL


def test_output_after_an_ending_is_dropped() -> None:
    harness = Harness(max_steps_in_flight=2, model=FakeModel(eos_at=1))
    record = make_record(PROMPT, max_tokens=8, eos_token_ids=(77,))
    harness.add(record)
    harness.drain()
    client = harness.clients[record.request_id]
    assert (client.reasons, client.stop_token_ids, len(client.tokens[0])) == ([FinishReason.STOP], [77], 2)
    assert sum(len(plan.chunks) for plan in harness.plans) == 3, "one step was in flight when the end was seen"
    harness.check_all()


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (StepResult(step=2, outputs=[RowOutput(0, [1])]), "result of step 1 expected, got 2"),
        (StepResult(step=1, outputs=[]), "row 0 must yield 1 tokens, got"),
        (StepResult(step=1, outputs=[RowOutput(0, [1, 2])]), "must yield 1 tokens"),
        (StepResult(step=1, outputs=[RowOutput(0, [-1])]), "must yield 1 tokens"),
        (StepResult(step=1, outputs=[RowOutput(0, [1]), RowOutput(0, [1])]), "two outputs"),
        (StepResult(step=1, outputs=[RowOutput(0, [1], None, [])]), "log-probabilities"),
        (StepResult(step=1, outputs=[RowOutput(0, [1], [TopLogprobs(0.0, 1, [], [])])]), "0 of 9 prompt log-prob"),
    ],
)
def test_a_result_that_does_not_answer_the_plan_changes_nothing(result: StepResult, reason: str) -> None:
    harness = Harness()
    harness.add(make_record(PROMPT, logprobs=1, prompt_logprobs=1))
    harness.plan()
    with pytest.raises(PagodaError, match=reason) as caught:
        harness.apply(result)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR
    assert harness.scheduler.steps_in_flight == 1
    harness.drain()
    harness.check_all()


def test_a_token_from_a_chunk_that_does_not_sample_is_an_error() -> None:
    harness = Harness(chunk_size=4)
    harness.add(make_record(PROMPT))
    harness.plan()
    with pytest.raises(PagodaError, match="must yield 0 tokens"):
        harness.apply(StepResult(step=1, outputs=[RowOutput(0, [1])]))


def test_a_result_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(PagodaError, match="no step is in flight"):
        Harness().apply(StepResult(step=1))


def test_output_for_unknown_rows_is_ignored() -> None:
    harness = Harness()
    record = make_record(PROMPT, max_tokens=1)
    harness.add(record)
    harness.plan()
    result = harness.results.popleft()
    stray = [RowOutput(99, [5]), *result.outputs]
    errors = [RowError(98, "internal_error", "not ours")]
    deltas = harness.apply(StepResult(step=1, outputs=stray, errors=errors))
    assert [delta.result.token_ids for delta in deltas] == reference_tokens(record)


# --- endings ---------------------------------------------------------------------------------------------------------


def test_stop_tokens_end_after_min_tokens_only() -> None:
    fourth = reference_tokens(make_record(PROMPT))[0][3]
    for min_tokens in (0, 3):
        harness = Harness()
        record = make_record(PROMPT, max_tokens=8, min_tokens=min_tokens, stop_token_ids=(fourth,))
        harness.add(record)
        harness.drain()
        harness.check_all()
        client = harness.clients[record.request_id]
        assert client.reasons == [FinishReason.STOP]
        assert client.stop_token_ids == [fourth]
        assert len(client.tokens[0]) == 4


def test_a_stop_token_sampled_too_early_does_not_end_a_choice() -> None:
    """Workers do not sample a stop token before min_tokens; if one does all the same, the request continues."""
    harness = Harness()
    record = make_record(PROMPT, max_tokens=3, min_tokens=1, stop_token_ids=(7,))
    harness.add(record)
    for step, ends in ((1, False), (2, True)):
        harness.scheduler.schedule(0.0)
        (delta,) = harness.apply(StepResult(step=step, outputs=[RowOutput(0, [7])]))
        assert delta.ends_request is ends


def test_the_worker_is_not_told_of_eos_it_must_ignore() -> None:
    harness = Harness()
    harness.add(make_record(PROMPT, eos_token_ids=(7,), ignore_eos=True))
    harness.add(make_record(PROMPT, eos_token_ids=(7,)))
    assert [new.eos_token_ids for new in harness.step().new_rows] == [(), (7,)]


def test_abort_ends_a_running_request_at_once() -> None:
    harness = Harness(max_steps_in_flight=2)
    record = make_record(PROMPT, max_tokens=50)
    harness.add(record)
    harness.plan()
    harness.plan()
    harness.land()
    harness.receive(harness.scheduler.abort(record.request_id, (), 1.0))
    client = harness.clients[record.request_id]
    assert (client.reasons, len(client.tokens[0])) == ([FinishReason.ABORT], 1)
    assert client.last is not None
    assert harness.scheduler.block_counts.blocks_used == 0
    assert harness.land() == []
    assert harness.step().finished_rows == [0]


def test_abort_of_one_choice_leaves_the_others() -> None:
    harness = Harness()
    record = make_record(PROMPT, n=3, max_tokens=6)
    harness.add(record)
    for _ in range(3):
        harness.step()
    harness.receive(harness.scheduler.abort(record.request_id, [1, 9], 0.0))
    client = harness.clients[record.request_id]
    assert client.reasons == [None, FinishReason.ABORT, None]
    assert client.last is None
    assert harness.scheduler.abort(record.request_id, [1], 0.0) == []
    harness.drain()
    harness.check_all()
    assert client.reasons == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH]


def test_unknown_ids_are_ignored() -> None:
    harness = Harness()
    assert harness.scheduler.abort("nobody", (), 0.0) == []
    assert harness.scheduler.fail("nobody", ErrorCode.INTERNAL, "", 0.0) == []


def test_fail_ends_waiting_and_running_choices() -> None:
    harness = Harness(max_rows=1)
    record = make_record(PROMPT, n=2)
    harness.add(record)
    harness.step()
    harness.receive(harness.scheduler.fail(record.request_id, ErrorCode.REQUEST_FAILED_REPEATEDLY, "twice", 0.0))
    client = harness.clients[record.request_id]
    assert client.reasons == [FinishReason.ERROR] * 2
    assert (client.error_code, client.error_message) == (ErrorCode.REQUEST_FAILED_REPEATEDLY, "twice")
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_error_ends_its_request_and_no_other(depth: int) -> None:
    harness = Harness(max_steps_in_flight=depth, poison_token_id=99, poison_at=2)
    good, bad = make_record(PROMPT, max_tokens=6), make_record([*PROMPT, 99], n=2, max_tokens=6)
    harness.add(good)
    harness.add(bad)
    harness.drain()
    client = harness.clients[bad.request_id]
    assert client.reasons == [FinishReason.ERROR] * 2
    assert (client.error_code, client.error_message) == (ErrorCode.NUMERICAL_ERROR, "poisoned prompt")
    harness.check_all()
    assert harness.clients[good.request_id].reasons == [FinishReason.LENGTH]
    dropped = {row_id for plan in harness.plans for row_id in plan.finished_rows}
    assert 1 in harness.runner.failed_rows
    assert 1 not in dropped, "the worker has dropped a failed row itself"


def test_an_unknown_row_error_code_becomes_internal() -> None:
    harness = Harness()
    record = make_record(PROMPT)
    harness.add(record)
    harness.plan()
    deltas = harness.apply(StepResult(step=1, errors=[RowError(0, "odd", "what?")]))
    assert [(d.error_code, d.error_message) for d in deltas] == [(ErrorCode.INTERNAL, "what?")]


def test_a_request_that_can_never_fit_is_refused() -> None:
    harness = Harness(num_blocks=4)
    fitting, too_long = make_record([1] * 10, max_tokens=7), make_record([1] * 10, max_tokens=8)
    assert harness.scheduler.fits(harness.request(fitting))
    assert not harness.scheduler.fits(harness.request(too_long))
    harness.add(too_long)
    client = harness.clients[too_long.request_id]
    assert client.error_code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "need 5 KV blocks; the worker has 4" in client.error_message
    assert not harness.has_work
    harness.add(fitting)
    harness.drain()
    assert harness.clients[fitting.request_id].reasons == [FinishReason.LENGTH]


def test_a_prompt_that_leaves_no_block_free_starts_all_the_same() -> None:
    harness = Harness(num_blocks=4)
    harness.add(make_record([1] * 13, max_tokens=4))
    harness.drain()
    harness.check_all()


def test_a_start_needs_a_block_to_go_on_with() -> None:
    harness = Harness(num_blocks=6)
    harness.add(make_record([1] * 9, max_tokens=4))
    harness.add(make_record([2] * 9, max_tokens=8))
    assert len(harness.step().new_rows) == 1, "three blocks hold the second prompt, but soon it needs a fourth"


def test_a_known_request_is_not_added_twice() -> None:
    harness = Harness()
    record = make_record(PROMPT)
    harness.add(record)
    with pytest.raises(PagodaError, match="here already"):
        harness.scheduler.add(harness.request(record), 0.0)


def test_prior_tokens_are_continued_not_repeated() -> None:
    harness = Harness()
    record = make_record(PROMPT, n=2, max_tokens=6)
    expected = reference_tokens(record)
    prior = [PriorOutput(choice=0, token_ids=expected[0][:4]), PriorOutput(choice=1, token_ids=expected[1][:1])]
    harness.add(record, prior=prior)
    plan = harness.step()
    assert plan.new_rows[0].token_ids == PROMPT + expected[0][:4]
    assert plan.new_rows[0].num_prompt_tokens == 10
    harness.drain()
    harness.check_all()
    usage = harness.clients[record.request_id].last.usage  # type: ignore[union-attr]
    assert (usage.output_tokens, usage.prompt_tokens) == (12, 10)


def test_a_choice_that_came_finished_gets_no_row() -> None:
    harness = Harness()
    record = make_record(PROMPT, n=2)
    harness.add(record, prior=[PriorOutput(choice=0, token_ids=[1], finished=True)])
    assert [new.choice for new in harness.step().new_rows] == [1]
    harness.drain()
    client = harness.clients[record.request_id]
    assert client.tokens == [[1], reference_tokens(record)[1]]


def test_a_request_whose_choices_are_all_finished_ends_in_add() -> None:
    harness = Harness(num_blocks=1)
    record = make_record(PROMPT)
    harness.add(record, prior=[PriorOutput(choice=0, token_ids=[1], finished=True)])
    assert harness.clients[record.request_id].last is not None
    assert not harness.has_work


def test_a_lost_worker_costs_time_but_no_token() -> None:
    harness = Harness(max_steps_in_flight=2, max_rows=2)
    records = [make_record(PROMPT, max_tokens=6) for _ in range(3)]
    for record in records:
        harness.add(record)
    for _ in range(3):
        harness.plan()
        harness.land()
        harness.clock.advance(1.0)
    harness.plan()
    taken = harness.lose_worker()
    assert [request.request_id for request in taken] == [record.request_id for record in records]
    assert [request.replays for request in taken] == [1, 1, 0], "the third had not started"
    harness.clock.advance(5.0)
    while harness.has_work:
        harness.step()
        harness.clock.advance(1.0)
    harness.check_all()
    ledger = causes(harness.clients[records[0].request_id].last)
    assert ledger["replaying"] == 5.0
    assert sum(ledger.values()) == 10.0


def test_replayed_requests_keep_their_place() -> None:
    harness = Harness(max_rows=1)
    old = make_record(PROMPT, max_tokens=4)
    harness.add(old)
    harness.step()
    requests = harness.scheduler.take_back(1.0)
    harness.new_worker()
    harness.clock.advance(1.0)
    harness.add(make_record(PROMPT, max_tokens=4))
    for request in requests:
        harness.scheduler.add(request, 1.0)
    (new,) = harness.step().new_rows
    assert len(new.token_ids) == 11


def test_as_many_adapters_run_as_the_worker_has_places_for_and_the_others_wait_in_order() -> None:
    one, two = (Adapter(digit * 64, "/adapters") for digit in "12")
    harness = Harness(max_adapters=1)
    first, second, third = (harness.add(make_record(adapter=adapter)) for adapter in (one, two, one))
    base = harness.add(make_record())
    harness.step()
    assert (first.num_rows, second.num_rows, third.num_rows, base.num_rows) == (1, 0, 0, 0), "nobody overtakes"
    assert second.ledger.cause is Cause.QUEUED_ADAPTERS
    harness.drain()
    for client in harness.clients.values():
        client.check_against_reference(harness.model)


def test_a_prefix_is_shared_by_requests_of_one_adapter_only() -> None:
    one, two = (Adapter(digit * 64, "/adapters") for digit in "12")
    harness, prompt = Harness(max_adapters=2), list(range(1, 14))
    for adapter, cached in ((None, 0), (one, 0), (two, 0), (one, 12), (None, 12), (two, 12)):
        request = harness.add(make_record(prompt, adapter=adapter))
        harness.drain()
        assert request.cached_prompt_tokens == cached


def test_rows_that_do_not_fit_into_one_message_come_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a request's parameters counts once per choice; one row always fits."""
    monkeypatch.setattr(plan, "MESSAGE_BYTES", 4000)
    harness = Harness(max_rows=16, num_blocks=200, max_tokens_per_step=512)
    large = {"allowed_token_ids": tuple(range(10_000, 10_300)), "max_tokens": 4}
    records = [make_record(PROMPT[:5], n=3, **large), make_record(PROMPT[:6], **large), make_record(PROMPT[:7], n=8)]
    records.append(make_record(PROMPT[:8], allowed_token_ids=tuple(range(10_000, 13_000)), max_tokens=4))
    for record in records:
        harness.add(record)
    plans = [harness.step() for _ in range(8)]
    harness.drain()
    sizes = [(len(each.new_rows), len(msgspec.msgpack.encode(each))) for each in plans]
    assert all(count == 1 or size < 5000 for count, size in sizes), sizes
    assert max(size for _, size in sizes) > 9000
    for record in records:
        assert harness.clients[record.request_id].tokens == reference_tokens(record)
    harness.check_all()
