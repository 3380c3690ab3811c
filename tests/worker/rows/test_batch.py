from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
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


def test_types() -> None:
    batch = build_batch(work_of([(3, 2, False)]), BLOCK, torch.device("cpu"))
    for tensor in (batch.token_ids, batch.positions, batch.kv_indices, batch.logit_indices):
        assert tensor.dtype == torch.int64
    assert batch.block_tables.dtype == torch.int32
    assert batch.block_tables.shape == (1, 2)
