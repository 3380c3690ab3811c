"""Batches renewed in place against batches built anew."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.fakes_model import new_row

from pagoda_proto.steps import Chunk
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.layouts import Layouts
from pagoda_worker.rows.rows import Row

BLOCK = 4
Work = list[tuple[Row, Chunk]]


def row_of(row_id: int, length: int, num_tables: int = 2) -> Row:
    """A row of `length` tokens; its blocks are numbered differently in each table."""
    tokens = np.arange(length) + 1000 * row_id
    first, *others = (np.arange(length // BLOCK + 1) + 100 * row_id + 50 * table for table in range(num_tables))
    return Row.of(new_row(row_id, tokens.tolist(), []), tokens, first, others=others)


def decoding(rows: list[Row]) -> Work:
    return [(row, Chunk(row.row_id, len(row.tokens) - 1, 1, True)) for row in rows]


def grow(row: Row, count: int = 1) -> None:
    for token in range(count):
        row.append(7000 + token + len(row.tokens))
        if len(row.tokens) > BLOCK * len(row.blocks):
            for table in (row.blocks, *row.others):
                table.extend(table.array[-1:] + 1)


def assert_same(batch: Batch, work: Work) -> None:
    fresh = build_batch(work, BLOCK, torch.device("cpu"))
    for name in ("token_ids", "positions", "kv_indices", "logit_indices", "lengths", "starts"):
        got, expected = getattr(batch, name), getattr(fresh, name)
        assert (got.dtype, got.tolist()) == (expected.dtype, expected.tolist()), name
    for name in ("query_starts", "query_lens", "context_lens", "num_logits"):
        assert getattr(batch, name) == getattr(fresh, name), name
    for got, expected in zip((batch, *batch.others), (fresh, *fresh.others), strict=True):
        assert got.kv_indices.tolist() == expected.kv_indices.tolist()
        for line, length in enumerate(fresh.context_lens):
            used = -(-length // BLOCK)
            assert got.block_tables[line, :used].tolist() == expected.block_tables[line, :used].tolist()


EVENTS = (*4 * ["decode"], "leave", "join", "turn", "replace", "drafts", "prompt", "given", "silent", "again")


@given(st.lists(st.integers(1, 11), min_size=1, max_size=5), st.lists(st.sampled_from(EVENTS), max_size=25))
def test_whatever_comes_next_is_laid_out_as_if_it_came_first(lengths: list[int], events: list[str]) -> None:
    layouts = Layouts(BLOCK)
    rows = [row_of(i, length) for i, length in enumerate(lengths)]
    for number, event in enumerate(events):
        if event == "leave" and len(rows) > 1:
            rows.pop(number % len(rows))
        elif event == "join":
            rows.append(row_of(10 + number, number + 1))
        elif event == "turn":
            rows.reverse()
        elif event == "replace":
            rows[0].replace_block(number % 2, 0, 25 + number)
        elif event == "drafts":  # accepted ones
            grow(rows[-1], 3)
        elif event == "given":
            grow(rows[0], 2)
        work, row, length = decoding(rows), rows[0], len(rows[0].tokens)
        if event == "prompt":
            work[0] = (row, Chunk(row.row_id, 0, length, True))
        elif event == "given" and length > 3:  # from where the step before ended
            work[0] = (row, Chunk(row.row_id, length - 3, 3, True))
        elif event == "silent":
            work[0] = (row, Chunk(row.row_id, length - 1, 1, False))
        assert_same(layouts.next(work), work)
        if event != "again":
            for row in rows:
                grow(row)


def test_a_step_that_continues_another_has_its_tensors() -> None:
    layouts, rows = Layouts(BLOCK), [row_of(1, 5), row_of(2, 2)]
    first = layouts.next(decoding(rows))
    for row in rows:
        grow(row)
    assert layouts.next(decoding(rows)) is first
    assert first.positions.tolist() == [5, 2]


def test_a_step_for_which_the_tables_lack_room_does_not() -> None:
    layouts, row = Layouts(BLOCK), row_of(1, 4)
    first = layouts.next(decoding([row]))
    grow(row)
    assert layouts.next(decoding([row])) is not first


def test_drafts_are_laid_out_behind_their_row() -> None:
    layouts, row = Layouts(BLOCK), row_of(1, 2)
    layouts.next(decoding([row]))
    grow(row)
    batch = layouts.next(decoding([row]), {1: np.array([5])})
    assert batch.token_ids.tolist() == [7002, 5]
    assert layouts.next(decoding([row])).token_ids.tolist() == [7002]
