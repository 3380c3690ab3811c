"""Lists of changes mean exactly the chunks that they leave out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_proto.decodes import DecodeList, DecodesDiffer, changes, packed
from pagoda_proto.steps import NO_TOKEN, Chunk, Decodes, RowOutput, StepPlan, TopLogprobs

ROWS = st.sets(st.integers(0, 30), max_size=12)
"""Rows that decode in a step. They are ordered by id, because a policy's order is fixed."""


@given(steps=st.lists(ROWS, max_size=12), jumps=st.lists(st.integers(2, 5), min_size=400, max_size=400))
def test_a_plan_of_changes_means_exactly_the_chunks_it_leaves_out(steps: list[set[int]], jumps: list[int]) -> None:
    here, before, starts = DecodeList(), [], {}
    for number, rows in enumerate(steps):
        after = sorted(rows)
        for row_id in after:
            starts[row_id] = starts.get(row_id, 0) + (1 if row_id in before else jumps[number * 31 + row_id])
        chunks = [Chunk(99, number, 7, False)]
        plan = StepPlan(step=1, decodes=changes(before, after, [starts[row_id] for row_id in after]), chunks=chunks)
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        expected = [Chunk(row_id, starts[row_id], 1, True) for row_id in after]
        assert here.chunks(plan) == expected + chunks
        assert plan.num_tokens == len(after) + 7
        before = after


def test_rows_that_go_on_are_not_named() -> None:
    rows = list(range(1000, 1256))
    assert changes(rows, list(rows), [5] * 256) == Decodes(256, sum(rows), 5 * 256)
    without = [row_id for row_id in rows if row_id != 1003]
    assert changes(rows, without, [5] * 255) == Decodes(255, sum(without), 5 * 255, [1003])
    assert changes(without, rows, [5] * 256) == Decodes(256, sum(rows), 5 * 256, [], [(3, 1003, 5)])


def decode_list() -> DecodeList:
    """Rows 4 and 6, which continue at positions 11 and 31."""
    rows = DecodeList()
    rows.chunks(StepPlan(step=1, decodes=changes([], [4, 6], [10, 30])))
    return rows


@pytest.mark.parametrize(
    "decodes",
    [
        Decodes(3, 10, 42),
        Decodes(2, 11, 42),
        Decodes(2, 10, 41),
        Decodes(),
        Decodes(2, 10, 42, [5]),
        Decodes(1, 4, 11, [6, 7]),
        Decodes(1, 4, 11, [6, 6]),
        Decodes(1, 4, 11),
    ],
)
def test_a_plan_for_another_list_is_refused(decodes: Decodes) -> None:
    rows = decode_list()
    with pytest.raises(DecodesDiffer):
        rows.chunks(StepPlan(step=2, decodes=decodes))


def test_the_plan_for_this_list_is_taken() -> None:
    assert decode_list().chunks(StepPlan(step=2, decodes=Decodes(2, 10, 42))) == [
        Chunk(4, 11, 1, True), Chunk(6, 31, 1, True),
    ]  # fmt: skip
    cleared = decode_list()
    cleared.clear()
    assert cleared.chunks(StepPlan(step=1)) == []


def test_tokens_stand_by_themselves_where_there_is_no_more_to_say() -> None:
    logprobs = [TopLogprobs(0.0, 1, [], [])]
    more = [
        RowOutput(2, [7], logprobs), RowOutput(3, [7], None, logprobs), RowOutput(4, [7, 8], None, None, 3),
        RowOutput(5, [7], None, None, 1), RowOutput(6, [7], None, None, 0, 1),
    ]  # fmt: skip
    other = RowOutput(10, [5])
    outputs = [RowOutput(1, [9]), *more, other]
    tokens, rest = packed([1, 2, 3, 4, 5, 6, 8], outputs)
    assert (tokens, rest) == ([9, *[NO_TOKEN] * 6], [*more, other])
    assert packed([], outputs) == ([], outputs)
