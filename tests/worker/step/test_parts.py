"""How rows that are read whole lie in a step: parts in their own blocks, unseen tokens over a shorter context."""

from __future__ import annotations

import numpy as np

from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import MAX_SIM, TOKEN_EMBED, PoolingParams
from pagoda_proto.steps import Chunk
from pagoda_worker.rows.rows import Ints, Row
from pagoda_worker.step.parts import laid_out

BLOCK = 4


def row(row_id: int, length: int, pooling: PoolingParams) -> tuple[Row, Chunk]:
    made = Row(
        row_id=row_id,
        tokens=Ints(np.arange(length) + 10 * row_id),
        blocks=Ints(np.empty(0, np.int64)),
        num_prompt_tokens=length,
        num_computed=0,
        params=SamplingParams(),
        seed=0,
        choice=0,
        processing=None,
        pooling=pooling,
    )
    return made, Chunk(row_id, 0, length, True)


def test_a_pair_is_two_parts_and_masks_stand_alone() -> None:
    work = [
        row(1, 5, PoolingParams(output=TOKEN_EMBED)),
        row(2, 9, PoolingParams(output=MAX_SIM, second_start=6, unseen=2)),
    ]
    batch = laid_out(work, BLOCK)
    assert batch.token_ids.tolist() == [*range(10, 15), *range(20, 29)]
    assert batch.query_lens == [5, 4, 1, 1, 3]
    assert batch.context_lens == [5, 4, 4, 4, 3]
    assert batch.positions.tolist() == [*range(5), *range(6), *range(3)]
    assert batch.kv_indices.tolist() == [*range(5), *range(8, 14), *range(16, 19)]
    assert [table[0] for table in batch.block_tables.tolist()] == [0, 2, 2, 2, 4]
