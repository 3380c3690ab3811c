"""Rows on the device against a model of them in Python."""

from __future__ import annotations

import torch
from tests.worker.kernels.triton.support import DEVICE, batch_of, moved, shape_of, walking

from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.triton.attention import Launch
from pagoda_worker.kernels.triton.rows import DecodeInputs, DeviceRows, advance
from pagoda_worker.kernels.triton.sampling import IN_PROMPT

BLOCK = 16


def test_advance_against_a_model_in_python() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, tables = DeviceRows.empty(300, 4, DEVICE), torch.randint(0, 99, (300, 4), generator=generator)
    lengths = torch.randint(0, 40, (300,), generator=generator)
    rows.block_tables.copy_(tables)
    rows.position.copy_(lengths)
    rows.counts_row[5] = 1
    counts = torch.zeros(2, 50, dtype=torch.int32, device=DEVICE)
    counts[1, 7] = IN_PROMPT
    order = torch.randperm(300, generator=generator)[:200].tolist()
    order[3], order[150] = -1, 5 if 5 not in order else -1
    model = {line: (int(lengths[line]), 0) for line in order if line >= 0}
    inputs = DecodeInputs.empty(200, DEVICE)
    lines = torch.tensor(order, dtype=torch.int32, device=DEVICE)
    untouched = sorted(set(range(300)) - set(order))
    for step in range(3):
        sampled = torch.randint(0, 50, (200,), generator=generator)
        sampled[order.index(5)] = 7
        advance(rows, inputs, lines, sampled.to(DEVICE), BLOCK, counts)
        for place, line in enumerate(order):
            if line < 0:
                assert (inputs.kv_indices[place], inputs.work[place, 0], inputs.token_ids[place]) == (-1, -1, 0)
                assert inputs.positions[place] == 0
                continue
            at, outputs = model[line][0] + 1, model[line][1] + 1
            model[line] = at, outputs
            assert rows.last_token[line] == inputs.token_ids[place] == sampled[place]
            assert rows.position[line] == inputs.positions[place] == at
            assert rows.context_len[line] == at + 1
            assert rows.output_position[line] == outputs
            assert inputs.kv_indices[place] == tables[line, at // BLOCK] * BLOCK + at % BLOCK
            assert inputs.work[place].tolist() == [line, place, 1, 0]
        assert counts[1].tolist() == [0] * 7 + [IN_PROMPT + step + 1] + [0] * 42
    assert not counts[0].any()
    assert torch.equal(rows.position[untouched].cpu(), lengths[untouched])
    assert not rows.output_position[untouched].any()


def test_attention_reads_the_rows_where_they_live() -> None:
    """A decode over device rows in places of their own choice gives the bits of the same batch made by the host."""
    shape = shape_of(4, 2, 64)
    kv_shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    kv = walking.new_kv_cache(kv_shape, 8, BLOCK)
    kv.storage.copy_(torch.randn(kv.storage.shape))
    query = torch.randn(2, 4, 64, device=DEVICE)
    batch = moved(batch_of([(1, 20, [4, 1]), (1, 35, [2, 7, 3])], BLOCK))
    expected = walking.attend(query, kv, 0, walking.plan(batch, kv), shape)

    rows = DeviceRows.empty(6, 3, DEVICE)
    for line, blocks, length in ((5, [4, 1], 19), (2, [2, 7, 3], 34)):
        rows.block_tables[line, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        rows.position[line] = length - 1
    inputs = DecodeInputs.empty(3, DEVICE)
    lines = torch.tensor([5, -1, 2], dtype=torch.int32, device=DEVICE)
    advance(rows, inputs, lines, torch.tensor([1, 2, 3], device=DEVICE), BLOCK)
    assert inputs.kv_indices.tolist() == [batch.kv_indices[0], -1, batch.kv_indices[1]]
    out = torch.zeros(3, 4 * 64, device=DEVICE)
    places = torch.stack((query[0], torch.zeros_like(query[0]), query[1]))
    launch = Launch(places, out, kv.layer(0), (rows.block_tables, rows.context_len), shape, None)
    launch.walk(inputs.work, 16)
    assert torch.equal(out[[0, 2]], expected)
    assert not out[1].any()
    again = torch.zeros_like(out)
    Launch(places, again, kv.layer(0), (rows.block_tables, rows.context_len), shape, None).split(inputs.work, 16, 2, 1)
    assert torch.equal(again, out)
