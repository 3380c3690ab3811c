"""Uploading a batch to a device: everything in two copies, each part aligned to 16 bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import new_row

from pagoda_proto.steps import Chunk
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.rows import Row
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots
from pagoda_worker.step.feeding import ALIGNED_BYTES, uploaded

SHAPES = [(0, 5, True), (7, 3, False), (3, 1, True)]  # of each row: first new token, their number, if sampled


def batch_of(slots: list[int]) -> Batch:
    work = []
    for i, ((start, count, sample), slot) in enumerate(zip(SHAPES, slots, strict=True)):
        row = Row.of(new_row(i, [0], [0]), np.arange(start + count), np.array([i]), slot=slot)
        work.append((row, Chunk(i, start, count, sample)))
    return build_batch(work, 16, torch.device("cpu"))


@pytest.mark.parametrize("slots", [[NO_ADAPTER] * 3, [1, NO_ADAPTER, 0]])
def test_all_of_a_batch_arrives_in_two_copies(slots: list[int]) -> None:
    accelerator, batch = FakeAccelerator(), batch_of(slots)
    there = uploaded(batch, accelerator)
    assert len(accelerator.uploads) == 2
    names = ("token_ids", "positions", "logit_indices", "kv_indices", "block_tables", "lengths")
    pairs = [(getattr(there, name), getattr(batch, name)) for name in names]
    if slots[0] == NO_ADAPTER:
        assert (there.slots, there.logit_slots) == (None, None)
    else:
        pairs += [(_sent(there.slots), torch.tensor([1] * 5 + [NO_ADAPTER] * 3 + [0]))]
        pairs += [(_sent(there.logit_slots), torch.tensor([1, 0]))]
    for got, expected in pairs:
        assert torch.equal(got, expected)
        assert got.data_ptr() % ALIGNED_BYTES == 0


def _sent(slots: TokenSlots | None) -> torch.Tensor:
    assert slots is not None
    assert slots.sent is not None
    assert slots.there is slots.sent
    assert slots.there.tolist() == slots.slots.tolist()
    return slots.sent
