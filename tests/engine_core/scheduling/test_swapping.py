"""Preempted choices whose KV is swapped to host memory; the fake worker checks every cell after it is swapped in."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import generate_latest
from tests.engine_core.fake_worker import make_hello
from tests.engine_core.fakes_sink import RecordingSink, ScriptedExecutor
from tests.engine_core.harness import Harness
from tests.fakes import ManualClock, make_record, reference_tokens

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.router import Router
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.metrics import Metrics
from pagoda_engine_core.scheduling.request import Request
from pagoda_engine_core.workers.registration import Registry
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import FinishReason

PROMPT = list(range(10, 20))
FORCED = {"num_swap_blocks": 16, "preemption": "swap"}


def preempt(harness: Harness, request: Request, index: int = 0) -> None:
    harness.scheduler._preempt(request.choices[index], harness.clock())
    harness.scheduler.check_invariants()


def begun(num_steps: int, *, max_tokens: int = 8, **options: object) -> tuple[Harness, Request]:
    """A scheduler with one request, after the results of `num_steps` steps."""
    harness = Harness(**(FORCED | options))  # type: ignore[arg-type]
    request = harness.add(make_record(PROMPT, max_tokens=max_tokens))
    for _ in range(num_steps):
        harness.step()
    return harness, request


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_swapped_choice_goes_on_where_it_was(prefix_cache: bool) -> None:
    harness, request = begun(2, prefix_cache=prefix_cache)
    table = list(request.choices[0].tables[0].ids)
    preempt(harness, request)
    assert (harness.scheduler.block_counts.blocks_used, harness.scheduler.block_counts.swap_blocks_used) == (0, 3)
    plan = harness.step()
    (new,) = plan.new_rows
    assert plan.finished_rows == [0]
    assert [block for block, _ in plan.swap_outs] == table
    assert (new.row_id, new.num_computed, len(new.token_ids)) == (1, 11, 12)
    swapped_to = [swap_block for _, swap_block in plan.swap_outs]
    if prefix_cache:  # the first two blocks are full and still cached
        assert plan.swap_ins == [(swapped_to[2], new.block_ids[2])]
        assert new.block_ids[:2] == table[:2]
    else:
        assert plan.swap_ins == list(zip(swapped_to, new.block_ids[:3], strict=True))
    harness.drain()
    harness.check_all()
    assert harness.runner.tokens_computed == 10 + 7, "nothing is computed twice"
    totals = harness.scheduler.totals
    assert (totals.preemptions, totals.swap_preemptions, totals.swapped_out_blocks) == (1, 1, 3)
    assert totals.swapped_in_blocks == len(plan.swap_ins)
    assert harness.clients[request.request_id].last.usage.preemptions == 1  # type: ignore[union-attr]


def test_blocks_run_out_and_nothing_is_computed_twice() -> None:
    harness = Harness(num_blocks=8, prefix_cache=False, **FORCED)
    for token in (1, 2):
        harness.add(make_record([token] * 9, max_tokens=16))
    harness.drain()
    harness.check_all()
    totals = harness.scheduler.totals
    assert totals.preemptions == totals.swap_preemptions == 1
    assert totals.swapped_out_blocks == totals.swapped_in_blocks > 0
    assert harness.runner.tokens_computed == 2 * (9 + 15)
    (swapping,) = [plan for plan in harness.plans if plan.swap_outs]
    given = {block for append in swapping.append_blocks for block in append.block_ids}
    assert given <= {block for block, _ in swapping.swap_outs}, "what is saved is given away by the same plan"


def test_a_step_in_flight_is_computed_again_and_no_other() -> None:
    harness, request = begun(2, max_steps_in_flight=2)
    harness.plan()  # samples a token that arrives after the preemption
    preempt(harness, request)
    plan = harness.plan()
    assert plan is not None
    (new,) = plan.new_rows
    assert (new.num_computed, len(new.token_ids)) == (11, 12)
    harness.land()
    harness.drain()
    harness.check_all()
    assert harness.runner.tokens_computed == 10 + 7 + 1


def test_a_prompt_in_chunks_keeps_the_chunks_that_are_confirmed() -> None:
    harness, request = begun(2, chunk_size=4, max_steps_in_flight=2, prefix_cache=False)
    harness.plan()
    preempt(harness, request)
    plan = harness.plan()
    assert plan is not None
    assert plan.new_rows[0].num_computed == 8
    harness.drain()
    harness.check_all()


def test_a_step_that_fails_after_its_row_was_swapped_leaves_nothing_behind() -> None:
    """The step's cells are tainted, but they are not kept, so the request ends with the failure itself."""
    harness = Harness(poison_token_id=13, poison_at=2, max_steps_in_flight=2, **FORCED)
    request = harness.add(make_record(PROMPT, max_tokens=8))
    other = harness.add(make_record([5, 6], max_tokens=8))
    for _ in range(2):
        harness.step()
    harness.plan()  # fails
    preempt(harness, request)
    harness.plan()  # swaps it in again, and fails once more
    harness.land()
    client = harness.clients[request.request_id]
    assert client.last is None, "the failure was of a row that is gone"
    harness.drain()
    harness.check_all()
    assert client.error_code is ErrorCode.NUMERICAL_ERROR
    assert harness.clients[other.request_id].reasons == [FinishReason.LENGTH]


def test_a_row_that_returned_and_was_not_heard_of_since_is_computed_again() -> None:
    """Only a result confirms that its blocks were swapped in."""
    harness, request = begun(3, max_steps_in_flight=2, prefix_cache=False)
    preempt(harness, request)
    harness.plan()
    preempt(harness, request)
    plan = harness.plan()
    assert plan is not None
    assert (plan.swap_outs, plan.swap_ins, plan.new_rows[0].num_computed) == ([], [], 0)
    harness.drain()
    harness.check_all()


def test_a_full_swap_space_leaves_computing() -> None:
    harness = Harness(num_swap_blocks=3, preemption="swap", prefix_cache=False)
    requests = [harness.add(make_record([i] * 9, max_tokens=6)) for i in range(2)]
    for _ in range(2):
        harness.step()
    for request in requests:
        preempt(harness, request)
    assert [request.choices[0].num_swapped for request in requests] == [10, 0]
    harness.drain()
    harness.check_all()
    totals = harness.scheduler.totals
    assert (totals.preemptions, totals.swap_preemptions) == (2, 1)


def test_whoever_ends_while_swapped_frees_its_swap_blocks() -> None:
    harness, request = begun(3)
    preempt(harness, request)
    harness.receive(harness.scheduler.abort(request.request_id, (), harness.clock()))
    harness.scheduler.check_invariants()
    assert harness.scheduler.block_counts.swap_blocks_used == 0
    harness.drain()
    harness.check_all()
    assert [plan.swap_ins for plan in harness.plans] == [[]] * len(harness.plans)


def test_a_failing_sibling_ends_a_swapped_choice_too() -> None:
    harness = Harness(poison_token_id=13, poison_at=3, **FORCED)
    request = harness.add(make_record(PROMPT, n=2, max_tokens=8))
    for _ in range(3):
        harness.step()
    preempt(harness, request, 1)
    while harness.has_work:
        harness.step()
        harness.scheduler.check_invariants()
    assert harness.clients[request.request_id].error_code is ErrorCode.NUMERICAL_ERROR
    harness.drain()


def test_host_memory_dies_with_its_worker() -> None:
    harness, request = begun(3)
    preempt(harness, request)
    assert harness.lose_worker() == [request]
    assert (request.choices[0].num_swapped, request.choices[0].swapped) == (0, [])
    (new,) = harness.step().new_rows
    assert (new.num_computed, len(new.token_ids)) == (0, 13)
    harness.drain()
    harness.check_all()
    assert not any(plan.swap_ins or plan.swap_outs for plan in harness.plans)


def test_choices_that_share_a_prompt_are_kept_apart() -> None:
    harness = Harness(prefix_cache=False, **FORCED)
    request = harness.add(make_record(PROMPT, n=3, max_tokens=8))
    for _ in range(4):
        harness.step()
    for index in range(3):
        preempt(harness, request, index)
    plan = harness.step()
    assert [new.num_computed for new in plan.new_rows] == [13, 12, 12]
    assert len({swap_block for _, swap_block in plan.swap_outs}) == len(plan.swap_outs)
    assert plan.block_copies == []
    harness.drain()
    harness.check_all()
    assert harness.runner.tokens_computed == 10 + 7 + 2 * 8


def test_a_swapped_choice_does_not_wait_for_a_sibling_that_computes_the_prompt() -> None:
    """Choice 0 is recomputed, and others could fork from it; choice 1 has its own KV in swap and need not wait."""
    harness = Harness(num_swap_blocks=4, preemption="swap", chunk_size=4, prefix_cache=False)
    request = harness.add(make_record(PROMPT, n=2, max_tokens=8))
    for _ in range(6):
        harness.step()
    preempt(harness, request, 1)
    preempt(harness, request, 0)
    assert [choice.num_swapped > 0 for choice in request.choices] == [False, True]
    assert [(new.choice, new.num_computed > 0) for new in harness.step().new_rows] == [(0, False), (1, True)]
    harness.drain()
    harness.check_all()


def test_owed_prompt_logprobs_are_computed_again() -> None:
    harness = Harness(chunk_size=4, **FORCED)
    request = harness.add(make_record(PROMPT, prompt_logprobs=1))
    harness.step()
    preempt(harness, request)
    assert request.choices[0].num_swapped == 0
    harness.drain()
    harness.check_all()


def test_swapped_choices_go_before_new_ones_of_their_priority_only() -> None:
    harness = Harness(max_rows=1, policy="priority", **FORCED)
    old = harness.add(make_record(PROMPT, max_tokens=8, priority=1))
    for _ in range(2):
        harness.step()
    equal, urgent = (harness.add(make_record([1], max_tokens=3, priority=priority)) for priority in (1, 0))
    preempt(harness, old)
    harness.drain()
    order = [new.num_prompt_tokens for plan in harness.plans[2:] for new in plan.new_rows]
    assert order == [1, 10, 1]
    assert urgent.ended
    assert equal.ended
    harness.check_all()


def test_a_measured_worker_recomputes_where_that_is_quicker() -> None:
    for swap_block_s, swaps in ((1e-9, True), (1e9, False)):
        harness = Harness(num_swap_blocks=16, swap_block_s=swap_block_s, block_size=16)
        request = harness.add(make_record([3] * 100, max_tokens=8))
        harness.plan()
        harness.land(forward_s=0.01)
        preempt(harness, request)
        assert (request.choices[0].num_swapped > 0) == swaps
        harness.drain()
        harness.check_all()


# --- seen from outside -----------------------------------------------------------------------------------------------


def test_metrics_tell_the_kinds_apart_and_how_full_the_space_is() -> None:
    executor, clock = ScriptedExecutor(), ManualClock(1000.0)
    engine = EngineCore(EngineConfig(preemption="swap", prefix_cache=False), executor, clock)
    executor.join(1, make_hello(num_blocks=8, num_swap_blocks=5))
    sink, metrics = RecordingSink(), Metrics()
    metrics.watch(engine.stats)
    records = [make_record([i] * 9, max_tokens=16) for i in range(3)]
    for record in records:
        engine.submit(record, sink)
    most_used = 0
    while executor.answer_all() or engine.step(0):
        most_used = max(most_used, engine.stats().blocks.swap_blocks_used)
    assert [sink.choices(record.request_id) for record in records] == [reference_tokens(record) for record in records]
    page = generate_latest(metrics.registry).decode()
    totals = engine.stats().totals
    assert 0 < most_used <= 5
    assert totals["swap_preemptions"] > 0
    recomputed = totals["preemptions"] - totals["swap_preemptions"]
    assert f'pagoda_engine_core_num_preemptions_total{{kind="swap"}} {totals["swap_preemptions"]:.1f}' in page
    assert f'pagoda_engine_core_num_preemptions_total{{kind="recompute"}} {recomputed:.1f}' in page
    assert f"pagoda_engine_core_swapped_out_blocks_total {totals['swapped_out_blocks']:.1f}" in page
    assert f"pagoda_engine_core_swapped_in_blocks_total {totals['swapped_in_blocks']:.1f}" in page
    assert "pagoda_engine_core_swap_blocks_total 5.0" in page
    assert "pagoda_engine_core_swap_blocks_used 0.0" in page


def test_a_worker_without_swap_space_where_swapping_was_asked_for_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(EngineConfig(preemption="swap"))
    with caplog.at_level(logging.WARNING):
        router.join(1, make_hello("roomy", num_swap_blocks=1))
        router.join(2, make_hello("bare"))
    assert [record.getMessage() for record in caplog.records] == [
        "preemption=swap, but worker bare has no swap space: it recomputes"
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_swap_blocks": -1}, "num_swap_blocks: must be between 0"),
        ({"num_swap_blocks": 2**31}, "num_swap_blocks: must be between 0"),
        ({"swap_block_s": -1.0}, "swap_block_s: must not be negative"),
        ({"swap_block_s": float("inf")}, "swap_block_s: must not be negative"),
        ({"swap_block_s": float("nan")}, "swap_block_s: must not be negative"),
    ],
)
def test_impossible_swap_space_is_refused(fields: dict[str, float], says: str) -> None:
    refused = Registry().refusal(make_hello(**fields), ())
    assert refused is not None
    assert refused.final
    assert refused.reason.startswith(says)
