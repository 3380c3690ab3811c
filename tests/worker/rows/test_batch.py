from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.worker.fakes_model import new_row

from pagoda_proto.steps import Chunk
from pagoda_worker.rows.batch import build_batch
from pagoda_worker.rows.rows import Row

BLOCK = 4


def work_of(shapes: list[tuple[int, int, bool]]) -> list[tuple[Row, Chunk]]:
    work = []
    for i, (start, count, sample) in enumerate(shapes):
        tokens = np.arange(start + count) + 1000 * i
        blocks = np.random.default_rng(i).permutation(50)[: (start + count) // BLOCK + 2]
        work.append((Row.of(new_row(i, tokens.tolist(), []), tokens, blocks), Chunk(i, start, count, sample)))
    return work


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans()), min_size=1, max_size=6))
@example([(3, 1, True), (0, 1, False), (17, 1, True)])
def test_layout(shapes: list[tuple[int, int, bool]]) -> None:
    work = work_of(shapes)
    batch = build_batch(work, BLOCK, torch.device("cpu"))
    assert batch.num_rows == len(work)
    assert batch.num_tokens == sum(chunk.num_tokens for _, chunk in work) == len(batch.token_ids)
    at, wanted = 0, []
    for i, (row, chunk) in enumerate(work):
        assert batch.query_starts[i] == at
        assert batch.query_lens[i] == chunk.num_tokens
        assert batch.context_lens[i] == chunk.start + chunk.num_tokens
        table = batch.block_tables[i].tolist()
        used = -(-batch.context_lens[i] // BLOCK)
        assert table[:used] == row.blocks.array[:used].tolist()
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            assert batch.token_ids[at] == row.tokens.array[position]
            assert batch.positions[at] == position
            assert batch.kv_indices[at] == row.blocks.array[position // BLOCK] * BLOCK + position % BLOCK
            at += 1
        wanted += [at - 1] if chunk.sample else []
    assert batch.query_starts[-1] == at
    assert batch.logit_indices.tolist() == wanted


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans()), min_size=1, max_size=6))
def test_chunks_of_attention_are_rows(shapes: list[tuple[int, int, bool]]) -> None:
    """Each token lies at its offset in a row that has the blocks of its attention chunk and no others."""
    whole, size = build_batch(work_of(shapes), BLOCK, torch.device("cpu")), 2 * BLOCK
    cut = whole.in_chunks(size, BLOCK)
    seen = []
    for row, length in enumerate(cut.query_lens):
        used, last = -(-cut.context_lens[row] // BLOCK), cut.context_lens[row] - length
        seen += [(cut.block_tables[row, :used].tolist(), last + i) for i in range(length)]
        assert length > 0
        assert cut.context_lens[row] <= size
    expected = []
    for row, (length, end) in enumerate(zip(whole.query_lens, whole.context_lens, strict=True)):
        for position in range(end - length, end):
            first, past = position // size * size, min(end, (position // size + 1) * size)
            expected.append((whole.block_tables[row, first // BLOCK : -(-past // BLOCK)].tolist(), position - first))
    assert seen == expected
    assert cut.positions.tolist() == [offset for _, offset in seen]
    assert cut.lengths.tolist() == cut.context_lens
    assert (cut.query_starts[-1], len(cut.query_starts)) == (whole.num_tokens, cut.num_rows + 1)


def test_types() -> None:
    batch = build_batch(work_of([(3, 2, False)]), BLOCK, torch.device("cpu"))
    for tensor in (batch.token_ids, batch.positions, batch.kv_indices, batch.logit_indices):
        assert tensor.dtype == torch.int64
    assert batch.block_tables.dtype == torch.int32
    assert batch.block_tables.shape == (1, 2)
