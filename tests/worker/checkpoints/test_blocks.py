"""Blocks of every kind are decoded as by the format's reference implementation (package gguf 0.19.0).

Its results are stored as digests, for blocks whose bytes come from an expanding hash.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

from pagoda_worker.checkpoints.blocks import AT_ONCE, BLOCKS

NUM_BLOCKS = 64
# Kind -> offsets of the float16 numbers in a block, and the first digits of SHA-256 over the float32 values.
REFERENCE = {
    "Q8_0": ((0,), "821798e385479f02"), "Q4_0": ((0,), "8fcf97f9c78ba021"), "Q5_0": ((0,), "d711fae9efbc8d0f"),
    "IQ4_NL": ((0,), "da53d8d93d7719a3"), "IQ4_XS": ((0,), "f596ba4a058d585e"), "Q4_1": ((0, 2), "a958e5bd4a135c48"),
    "Q5_1": ((0, 2), "409d9419fd117db8"), "Q2_K": ((80, 82), "48a9b261a08a651e"), "Q3_K": ((108,), "325411b649aae9fe"),
    "Q4_K": ((0, 2), "f9133b29716be8d2"), "Q5_K": ((0, 2), "b472ceaa0ad317ad"), "Q6_K": ((208,), "668f7a8803fb69ae"),
    "MXFP4": ((), "d9ee3d0af2b6994f"),
}  # fmt: skip


def blocks_of(kind: str) -> torch.Tensor:
    """[NUM_BLOCKS, bytes], with float16 numbers of limited size."""
    size = BLOCKS[kind].num_bytes
    raw = bytearray(hashlib.shake_256(kind.encode()).digest(NUM_BLOCKS * size))
    for start in range(0, len(raw), size):
        for at in REFERENCE[kind][0]:
            raw[start + at + 1] = raw[start + at + 1] & 0x8F | 0x20
        if kind == "MXFP4":  # the exponent of a power of two
            raw[start] = raw[start] & 0x1F | 0x60
    return torch.frombuffer(raw, dtype=torch.uint8).view(NUM_BLOCKS, size)


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_the_reference(kind: str) -> None:
    values = BLOCKS[kind].widened(blocks_of(kind).view(8, -1), torch.float32)
    assert values.shape == (8, 8 * BLOCKS[kind].values)
    digest = hashlib.sha256((values + 0.0).numpy().astype("<f4").tobytes()).hexdigest()  # + 0.0 turns -0.0 into 0.0
    assert digest.startswith(REFERENCE[kind][1])


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_rounded_once_and_rows_do_not_depend_on_one_another(kind: str) -> None:
    raw = blocks_of(kind).view(8, -1)
    wide = BLOCKS[kind].widened(raw, torch.float32)
    assert torch.equal(BLOCKS[kind].widened(raw, torch.bfloat16), wide.bfloat16())
    many = raw.repeat(AT_ONCE // wide.numel() + 2, 1)  # more than are decoded at once
    assert torch.equal(BLOCKS[kind].widened(many, torch.float32), wide.repeat(len(many) // 8, 1))
    assert torch.equal(BLOCKS[kind].widened(raw.view(2, 4, -1), torch.float32), wide.view(2, 4, -1))
