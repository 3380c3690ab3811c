from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.fakes_model import new_row

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import NO_BLOCK, AppendBlocks, Chunk, KVGroup, NewRow, ReplaceBlock, StepPlan
from pagoda_worker.rows.rows import Ints, Row
from pagoda_worker.step.table import RowTable, RunnerFacts

FACTS = RunnerFacts(
    model_fingerprint="f",
    numerics_id="n",
    device="cpu",
    vocab_size=100,
    max_model_len=64,
    kv_groups=(KVGroup(8, num_swap_blocks=4),),
    block_size=16,
    max_rows=3,
    max_tokens_per_step=40,
)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.lists(st.integers(0, 9), max_size=200), max_size=5))
def test_ints_is_a_list(start: list[int], parts: list[list[int]]) -> None:
    ints, plain = Ints(np.array(start, np.int64)), list(start)
    for part in parts:
        ints.extend(np.array(part, np.int64))
        ints.append(7)
        plain += [*part, 7]
    assert ints.array.tolist() == plain
    assert len(ints) == len(plain)


def test_outputs_are_what_follows_the_prompt() -> None:
    row = Row.of(new_row(1, [5, 6, 7, 8], [], num_prompt_tokens=3), np.array([5, 6, 7, 8]), np.array([], np.int64))
    row.append(9)
    assert (row.outputs.tolist(), row.num_outputs) == ([8, 9], 2)


def table(*rows: NewRow) -> RowTable:
    made = RowTable(FACTS)
    made.apply(StepPlan(step=1, new_rows=list(rows)))
    assert made.take_errors() == []
    return made


def errors_of(made: RowTable, **plan: object) -> dict[int, str]:
    made.apply(StepPlan(step=2, **plan))  # type: ignore[arg-type]
    return {error.row_id: error.message for error in made.take_errors()}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": [100]}, "token_ids must be between 0 and 99"),
        ({"token_ids": [-1]}, "token_ids must be between"),
        ({"token_ids": [2**64 - 1]}, "token_ids: a value is out of range"),
        ({"token_ids": []}, "num_prompt_tokens=2 does not fit 0"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens=0"),
        ({"num_prompt_tokens": 3}, "num_prompt_tokens=3"),
        ({"num_computed": 2}, "num_computed=2 does not fit 2"),
        ({"num_computed": -1}, "num_computed=-1"),
        ({"block_ids": [8]}, "block_ids must be between 0 and 7"),
        ({"block_ids": [2**70]}, "block_ids: a value is out of range"),
        ({"eos_token_ids": (100,)}, "eos_token_ids must be"),
        ({"seed": -1}, "seed -1"),
        ({"choice": 2**32}, "choice 4294967296"),
        ({"params": SamplingParams(logit_bias={100: 1.0})}, "logit_bias: token ids must be between 0 and 99"),
        ({"params": SamplingParams(bad_words_token_ids=((1, 100),))}, "bad_words: token ids"),
    ],
)
def test_a_new_row_that_cannot_be_is_refused_alone(changes: dict[str, object], says: str) -> None:
    made = RowTable(FACTS)
    bad = msgspec.structs.replace(new_row(2, [1, 2], [1]), **changes)
    errors = errors_of(made, new_rows=[new_row(1, [1, 2], [0]), bad])
    assert list(errors) == [2]
    assert says in errors[2]
    assert len(made) == 1


def test_too_many_rows_and_a_row_twice() -> None:
    made = table(new_row(1, [1], [0]), new_row(2, [1], [1]))
    assert list(errors_of(made, new_rows=[new_row(3, [1], [2]), new_row(4, [1], [3]), new_row(1, [1], [4])])) == [4, 1]
    assert len(made) == 2
    assert errors_of(made, finished_rows=[2, 77], new_rows=[new_row(5, [1], [0])]) == {}


def test_changes_to_blocks_are_checked() -> None:
    made = table(*(new_row(i, [1] * 20, [i, i + 3]) for i in range(3)))
    errors = errors_of(
        made,
        append_blocks=[AppendBlocks(0, [9]), AppendBlocks(1, [6]), AppendBlocks(44, [1])],
        replace_blocks=[ReplaceBlock(1, 2, 7), ReplaceBlock(2, 2, 7)],
    )
    assert set(errors) == {0, 44, 2}
    [(row, _)] = made.accept([Chunk(1, 0, 20, True)])
    assert row.blocks.array.tolist() == [1, 4, 7]


def test_an_impossible_copy_ends_the_rows_that_would_read_it() -> None:
    made = table(new_row(1, [1], [3]), new_row(2, [1], [4]), new_row(3, [1], [5]))
    copies = [(0, 4), (8, 3), (1, -1), (1, 5), (2, 5), (2**64 - 1, 6)]
    assert made.copies(StepPlan(step=2, block_copies=copies)) == [(0, 4)]
    assert [error.row_id for error in made.take_errors()] == [1, 3]


def test_an_impossible_swap_ends_the_rows_that_would_read_it() -> None:
    made = table(new_row(1, [1], [3]), new_row(2, [1], [4]), new_row(3, [1], [5]))
    outs = [(0, 0), (8, 1), (0, 4), (-1, 2), (1, 3), (2, 3), (2, 2**64 - 1)]
    assert made.swap_outs(StepPlan(step=2, swap_outs=outs)) == [(0, 0)]
    assert made.take_errors() == []
    ins = [(0, 3), (1, 4), (0, 8), (5, 6)]  # swap block 1 was never filled: its source block does not exist
    assert made.swap_ins(StepPlan(step=3, swap_ins=ins)) == [(0, 3)]
    assert [(error.row_id, error.code) for error in made.take_errors()] == [(2, ErrorCode.INTERNAL)]
    assert made.swap_ins(StepPlan(step=4, swap_ins=[(0, 5), (0, 5)])) == []
    assert [(error.row_id, error.code) for error in made.take_errors()] == [(3, ErrorCode.PROTOCOL_ERROR)]


def test_a_swap_block_holds_something_from_its_swap_out_until_another_cannot_be_made_or_all_is_forgotten() -> None:
    made = table()
    into = StepPlan(step=3, swap_ins=[(1, 2)])
    assert made.swap_ins(into) == []
    made.swap_outs(StepPlan(step=2, swap_outs=[(0, 0), (3, 1)]))
    assert made.swap_ins(into) == [(1, 2)]
    assert made.swap_outs(StepPlan(step=2, swap_outs=[(-1, 1)])) == []
    assert made.swap_ins(into) == []
    assert made.swap_ins(StepPlan(step=4, swap_ins=[(0, 2)])) == [(0, 2)]
    made.clear()
    assert made.swap_ins(StepPlan(step=4, swap_ins=[(0, 2)])) == []


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (Chunk(1, 0, 0, False), "cannot be next"),
        (Chunk(1, 0, -1, False), "cannot be next"),
        (Chunk(1, 1, 4, False), "cannot be next"),
        (Chunk(1, 0, 21, True), "cannot be next"),
        (Chunk(1, 0, 2**70, True), "cannot be next"),
        (Chunk(1, 0, 4, True), "known already"),
        (Chunk(3, 0, 20, True), "blocks do not hold"),
        (Chunk(9, 0, 1, False), "unknown"),
        (Chunk(2, 0, 40, True), "at most 40 tokens"),
    ],
)
def test_a_chunk_that_cannot_be_next_ends_its_row_alone(chunk: Chunk, says: str) -> None:
    made = table(new_row(1, [1] * 20, [0, 1]), new_row(2, [1] * 40, [2, 3, 4]), new_row(3, [1] * 20, [5]))
    good = Chunk(2 if chunk.row_id != 2 else 1, 0, 20, chunk.row_id == 2)
    accepted = made.accept([good, chunk])
    [error] = made.take_errors()
    assert error.row_id == chunk.row_id
    assert says in error.message
    assert error.code == ErrorCode.PROTOCOL_ERROR
    assert [row.row_id for row, _ in accepted] == [good.row_id]


def test_the_context_limit_holds_even_where_blocks_would_do() -> None:
    made = table(new_row(1, [1] * 70, list(range(8)), num_computed=60))
    assert made.accept([Chunk(1, 60, 10, True)]) == []
    assert "context of 64" in made.take_errors()[0].message


def test_two_chunks_of_a_row_in_one_step_end_it() -> None:
    made = table(new_row(1, [1] * 20, [0, 1]))
    assert made.accept([Chunk(1, 0, 10, False), Chunk(1, 10, 10, True)]) == []
    assert [error.row_id for error in made.take_errors()] == [1]
    assert len(made) == 0


WINDOWED = replace(FACTS, kv_groups=(KVGroup(8, num_swap_blocks=4), KVGroup(3, 20, num_swap_blocks=2)))


def test_a_row_has_a_table_for_each_group() -> None:
    made = RowTable(WINDOWED)
    new = new_row(1, [1] * 60, [0, 1, 2, 7, NO_BLOCK, 8, 9, 10], num_computed=40)
    errors = errors_of(made, new_rows=[new], append_blocks=[AppendBlocks(1, [3, 8])])
    assert errors == {}
    assert errors_of(made, replace_blocks=[ReplaceBlock(1, 2, 10), ReplaceBlock(1, 3, 5)]) == {}
    [(row, _)] = made.accept([Chunk(1, 40, 20, True)])
    assert row.blocks.array.tolist() == [0, 1, 2, 5, 3]
    assert [table.array.tolist() for table in row.others] == [[-1, 0, 2, 2, 0]]


@pytest.mark.parametrize(
    ("block_ids", "says"),
    [
        ([0, 1, 8], "3 do not divide evenly into 2 groups"),
        ([0, 1, 8, 7], "block_ids must be between 8 and 10"),
        ([0, 8, 8, 9], "block_ids must be between 0 and 7"),
        ([NO_BLOCK, 1, 8, 9], "block_ids must be between 0 and 7"),
        ([0, 1, 8, NO_BLOCK], "block_ids must be between"),
        ([0, 1, NO_BLOCK, 8], "block_ids must be between"),  # the next token reads it
        ([0, 1, 8, 11], "block_ids must be between 0 and 10"),
    ],
)
def test_a_block_of_another_group_or_a_hole_ends_the_row_that_has_it(block_ids: list[int], says: str) -> None:
    made = RowTable(WINDOWED)
    errors = errors_of(made, new_rows=[new_row(1, [1], [0, 8]), new_row(2, [1], block_ids)])
    assert list(errors) == [2]
    assert says in errors[2]


def test_nothing_is_moved_from_group_to_group() -> None:
    made = RowTable(WINDOWED)
    made.apply(StepPlan(step=1, new_rows=[new_row(1, [1], [3, 8]), new_row(2, [1], [4, 9])]))
    assert made.copies(StepPlan(step=2, block_copies=[(8, 10), (9, 4)])) == [(8, 10)]
    assert [error.row_id for error in made.take_errors()] == [2]
    assert made.swap_outs(StepPlan(step=3, swap_outs=[(0, 0), (10, 5), (8, 1), (1, 4)])) == [(0, 0), (10, 5)]
    assert made.swap_ins(StepPlan(step=4, swap_ins=[(5, 8)])) == [(5, 8)]
    assert made.swap_ins(StepPlan(step=5, swap_ins=[(4, 8)])) == []
    assert [error.row_id for error in made.take_errors()] == [1]
