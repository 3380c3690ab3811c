from __future__ import annotations

import msgspec
import pytest
from tests.engine_core.harness import Harness
from tests.fakes import make_record

from pagoda_engine_core.scheduling import plan as plans
from pagoda_engine_core.scheduling.blocks import Table
from pagoda_engine_core.scheduling.decoding import NOBODY
from pagoda_engine_core.scheduling.kv_cache import NO_GROWTH, Growth
from pagoda_engine_core.scheduling.plan import Budget, PlanBuilder
from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_proto import params
from pagoda_proto.channel import MAX_FRAME_BYTES
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Generate, PriorOutput, Resume
from pagoda_proto.steps import AppendBlocks, Chunk, Decodes, ReplaceBlock


def make_choice(num_prompt: int = 4, row_id: int = 0) -> Choice:
    choice = Request(make_record([1] * num_prompt), max_output_tokens=8, now=0.0).choices[0]
    choice.row_id = row_id
    return choice


def test_promised_tokens_are_not_granted_to_prompts() -> None:
    budget = Budget(tokens=10, chunk_size=8, promised=3)
    assert budget.left == 7
    assert budget.grant(100) == 7
    assert budget.grant(100) == 0
    assert [budget.grant_promised() for _ in range(3)] == [1, 1, 1]
    assert budget.left == 0


def test_a_grant_is_one_chunk_at_most() -> None:
    budget = Budget(tokens=100, chunk_size=8, promised=0)
    assert [budget.grant(wanted) for wanted in (5, 8, 9, 1000)] == [5, 8, 8, 8]
    assert budget.left == 71


def test_more_promises_than_tokens() -> None:
    budget = Budget(tokens=2, chunk_size=8, promised=3)
    assert budget.left == 0
    assert [budget.grant_promised() for _ in range(3)] == [1, 1, 0]


def test_launch_moves_choices_to_where_the_step_leaves_them() -> None:
    prefill, decode, part, short = make_choice(4, 0), make_choice(4, 1), make_choice(9, 2), make_choice(1, 3)
    decode.num_computed, decode.num_pending = 4, 1
    builder = PlanBuilder(Budget(100, 100, 0))
    assert builder.empty
    builder.compute(prefill, 4)
    builder.compute(part, 5)
    builder.compute(short, 1)
    builder.decodes = [decode]
    assert (prefill.num_computed, prefill.launched) == (0, False), "nothing moves while the plan is being made"
    plan, flight = builder.launch(7, NOBODY, [5], [(3, 1)])
    assert (plan.step, flight.step, plan.finished_rows, plan.swap_outs) == (7, 7, [5], [(3, 1)])
    assert plan.decodes == Decodes(1, 1, 4, [], [(0, 1, 4)])
    assert plan.chunks == [Chunk(3, 0, 1, True), Chunk(0, 0, 4, True), Chunk(2, 0, 5, False)]
    assert (plan.num_tokens, flight.num_tokens, flight.num_rows) == (11, 11, 4)
    assert list(flight.present()) == [decode, short, prefill, part]
    assert [(c.num_computed, c.num_pending) for c in (prefill, decode, part, short)] == [(4, 1), (5, 2), (5, 0), (1, 1)]


def test_steps_of_the_same_rows_share_one_list() -> None:
    rows = [make_choice(4, row_id) for row_id in range(3)]
    flight, decodes = None, []
    for step in (1, 2):
        builder = PlanBuilder(Budget(100, 100, 0))
        builder.decodes = list(rows)
        plan, after = builder.launch(step, flight.rows if flight else NOBODY, [], [])
        assert flight is None or after.rows is flight.rows
        flight = after
        decodes.append(plan.decodes)
    assert decodes == [Decodes(3, 3, 0, [], [(0, 0, 0), (1, 1, 0), (2, 2, 0)]), Decodes(3, 3, 3)]


def test_rows_with_drafts_have_chunks_and_so_have_those_beside_them() -> None:
    """The next position of a row with drafts is unknown, so it cannot be in `decodes`, whose rows advance by one."""
    rows = [make_choice(4, row_id) for row_id in range(2)]
    builder = PlanBuilder(Budget(100, 100, 0))
    builder.decodes = list(rows)
    builder.allow_drafts(rows[1], 3)
    plan, flight = builder.launch(1, NOBODY, [], [])
    assert (plan.decodes, flight.rows.row_ids) == (Decodes(), [])
    assert plan.chunks == [Chunk(0, 0, 1, True), Chunk(1, 0, 1, True, 3)]


def test_growth_of_a_known_row_is_told_as_changes() -> None:
    builder = PlanBuilder(Budget(100, 100, 0))
    known = [make_choice(4, row_id) for row_id in (3, 4)]
    for choice in known:
        choice.launched = True
    builder.grow_row(known[0], NO_GROWTH)
    builder.grow_row(known[1], Growth([8, 9], [(1, 7)], [(2, 7)]))
    plan, _ = builder.launch(1, NOBODY, [], [])
    assert not plan.new_rows
    assert plan.append_blocks == [AppendBlocks(4, [8, 9])]
    assert plan.replace_blocks == [ReplaceBlock(4, 1, 7)]
    assert plan.block_copies == [(2, 7)]


def test_a_new_row_brings_its_table_and_only_copies_remain() -> None:
    record = make_record([1, 2, 3], n=2, seed=9, prompt_logprobs=1, eos_token_ids=(5,), cache_salt="theirs.mine")
    resume = Resume(prior_outputs=(PriorOutput(choice=1, token_ids=[6]),))
    request = Request(record, max_output_tokens=8, now=0.0, resume=resume)
    choice = request.choices[1]
    choice.row_id, choice.tables, choice.num_computed = 4, [Table([3, 7])], 2
    builder = PlanBuilder(Budget(100, 100, 0))
    builder.start_row(choice, Growth([], [(1, 7)], [(2, 7)]), [(3, 4)])
    plan, _ = builder.launch(1, NOBODY, [], [])
    (new,) = plan.new_rows
    assert (new.row_id, new.token_ids, new.num_prompt_tokens, new.num_computed) == (4, [1, 2, 3, 6], 3, 2)
    assert (new.block_ids, new.seed, new.choice, new.eos_token_ids) == ([3, 7], 9, 1, (5,))
    assert new.domain == "theirs.mine", "what shares prefixes shares drafts, and nobody else does"
    assert new.params.prompt_logprobs is None
    assert (plan.replace_blocks, plan.append_blocks, plan.block_copies) == ([], [], [(2, 7)])
    assert plan.swap_ins == [(3, 4)]


def test_beams_that_begin_anew_come_in_as_many_messages_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MESSAGE_BYTES", 5000)
    harness = Harness(num_blocks=200, max_tokens_per_step=512)
    harness.add(make_record([7 + place for place in range(100)], n=4, use_beam_search=True, max_tokens=6))
    harness.drain()
    assert max(len(plan.new_rows) for plan in harness.plans) == 3
    harness.check_all()


def test_a_plan_of_rows_that_ask_for_all_they_may_is_one_that_a_worker_takes() -> None:
    """All these rows in one plan would take 200 MiB."""
    ids = range(70_000, 70_000 + params.MAX_ALLOWED_TOKEN_IDS)
    asked = SamplingParams(
        n=16,
        max_tokens=2,
        seed=1,
        allowed_token_ids=tuple(ids),
        stop_token_ids=tuple(ids[: params.MAX_STOP_TOKEN_IDS]),
        logit_bias=dict.fromkeys(ids[: params.MAX_LOGIT_BIAS], 0.5),
        bad_words_token_ids=((ids[0],) * params.MAX_BAD_WORD_TOKENS,),
        stop=("\N{GRINNING FACE}" * params.MAX_STOP_STRING_CHARS,) * params.MAX_STOP_STRINGS,
        grammar="\N{GRINNING FACE}" * params.MAX_GRAMMAR_CHARS,
    )
    harness = Harness(max_rows=240, num_blocks=2000, max_tokens_per_step=2048)
    for _ in range(15):
        record = make_record([1, 2, 3], n=16, max_tokens=2, seed=1)
        harness.add(msgspec.structs.replace(record, task=Generate(params=asked, seed=1)))
    sizes = []
    while harness.has_work:
        sizes.append(len(msgspec.msgpack.encode(harness.step())))
    assert MAX_FRAME_BYTES / 2 < max(sizes) < MAX_FRAME_BYTES
    assert all(client.last is not None for client in harness.clients.values())
