"""Latents stored once, used as keys and values, give the same bits as latents stored twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tests.worker.fakes_capturable import decoder_of
from tests.worker.kernels.closeness import assert_close
from tests.worker.kernels.triton.support import (
    DEVICE,
    DTYPES,
    batch_of,
    moved,
    reference,
    shape_of,
    splitting,
    walking,
)
from tests.worker.kernels.triton.test_recorded import DEEPSEEK

from pagoda_worker.checkpoints.rope import RopeShape, RotaryTable
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.triton.ops import TritonKVCache, TritonOps
from pagoda_worker.loading.model import native_spec
from pagoda_worker.rows.batch import Batch
from pagoda_worker.step.moving import SwapSpace

BLOCK, NUM_BLOCKS, HEADS = 16, 24, 5
RANK, TURNS = 512, 64
DIM = RANK + TURNS
PLACES = torch.randperm(NUM_BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))


class Lines(NamedTuple):
    """Inputs of `latent_write` for a token in every slot of a cache."""

    query: torch.Tensor
    latent: torch.Tensor
    turning: torch.Tensor

    def cast(self, device: torch.device, dtype: torch.dtype) -> Lines:
        return Lines(*(one.to(device, dtype, copy=True) for one in self))


def drawn(dtype: torch.dtype) -> Lines:
    generator = torch.Generator().manual_seed(2)
    sizes = (HEADS * DIM, RANK, TURNS)
    return Lines(*(torch.randn(len(PLACES), size, generator=generator).to(dtype) for size in sizes))


def kept(dtype: torch.dtype, planes: int) -> KVShape:
    return KVShape(num_layers=2, num_kv_heads=1, head_dim=DIM, dtype=dtype, planes=planes)


def written(ops: Ops, lines: Lines, shape: KVShape) -> tuple[torch.Tensor, Any]:
    """The rotated queries, and a cache with latents in its last layer."""
    kv = ops.new_kv_cache(shape, NUM_BLOCKS, BLOCK)
    table = RotaryTable(RopeShape(theta=1e4, head_dim=DIM, turning=TURNS), 512, ops.device)
    rotation = table.at((PLACES % 512).to(ops.device))
    given = lines.cast(ops.device, shape.dtype)
    return ops.latent_write(*given, rotation, kv, 1, PLACES.to(ops.device)), kv


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_plane_has_the_keys_of_two(dtype: torch.dtype) -> None:
    lines = drawn(dtype)
    (query, once), (same, twice) = (written(walking, lines, kept(dtype, planes)) for planes in (1, 2))
    assert torch.equal(query, same)
    assert torch.equal(once.storage, twice.storage[:, :1])
    assert not torch.equal(twice.storage[1, 0], twice.storage[1, 1])
    keys, values = once.layer(1)
    assert keys.data_ptr() == values.data_ptr()
    assert once.storage.nbytes == NUM_BLOCKS * once.shape.bytes_per_block(BLOCK) == twice.storage.nbytes // 2
    expected, wide = written(reference, lines, kept(torch.float64, 1))
    assert_close(query, expected)
    assert_close(once.storage[1].permute(1, 3, 0, 2, 4), wide.layers[1][:NUM_BLOCKS])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", [walking, splitting], ids=["walk", "split"])
def test_what_leads_back_gives_the_same_bits(ops: TritonOps, dtype: torch.dtype) -> None:
    """For decodes and chunks, over one split and several; the projection ignores the rotated dimensions."""
    lines, shape = drawn(dtype), shape_of(HEADS, 1, DIM)
    tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    batch = moved(batch_of([(1, 300, tables[:19]), (9, 70, tables[19:]), (1, 1, tables[:1])], BLOCK))
    attended = []
    for planes in (1, 2):
        query, kv = written(ops, lines, kept(dtype, planes))
        attended.append(ops.attend(query[: batch.num_tokens], kv, 1, ops.plan(batch, kv), shape))
    weight = torch.randn(HEADS, 20, DIM, generator=torch.Generator().manual_seed(4)) * RANK**-0.5
    weight[:, :, : TURNS // 2] = 0.0
    weight[:, :, DIM // 2 : (DIM + TURNS) // 2] = 0.0
    outward = ops.pack_heads(weight.to(DEVICE, dtype))
    once, twice = attended
    assert not torch.equal(once, twice)  # in the rotated dimensions
    assert torch.equal(ops.head_linear(once, outward), ops.head_linear(twice, outward))


class OneCache(NamedTuple):
    """The parts of a loaded model that moving blocks needs."""

    ops: TritonOps = walking
    device: torch.device = DEVICE


def test_blocks_of_one_plane_move() -> None:
    """To the reference and back, out to swap blocks and back, and within a cache."""
    shape = kept(torch.float32, 1)
    _, kv = written(walking, drawn(torch.float32), shape)
    before, loaded = kv.storage.clone(), OneCache()
    exported = walking.export_blocks(kv, [5, 0, 3])
    assert exported.cells.shape == (3, 1, 2, 1, BLOCK, DIM)
    theirs = reference.new_kv_cache(shape, 4, BLOCK)
    reference.import_blocks(theirs, [2, 1, 0], replace(exported, cells=exported.cells.cpu()))
    walking.import_blocks(kv, [7, 8, 9], reference.export_blocks(theirs, [2, 1, 0]))
    space = SwapSpace(loaded, shape, kv, BLOCK, 2, None)  # type: ignore[arg-type]
    space.swap_out([(5, 1), (1, 0)])
    walking.copy_blocks(kv, [(2, 5), (3, 1)])
    space.swap_in([(1, 10), (0, 11)])
    moved_from = list(range(NUM_BLOCKS))
    moved_from[5], moved_from[1], moved_from[7:12] = 2, 3, [5, 0, 3, 5, 1]
    assert torch.equal(kv.storage, before[:, :, moved_from])
    with pytest.raises(ValueError, match="do not fit"):
        walking.import_blocks(walking.new_kv_cache(kept(torch.float32, 2), 4, BLOCK), [0, 1, 2], exported)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ops", [walking, splitting], ids=["walk", "split"])
def test_a_model_has_the_same_logits(ops: TritonOps, dtype: torch.dtype) -> None:
    """A prompt in two chunks, then decodes, beside another row."""
    spec = native_spec("DeepseekV3ForCausalLM", DEEPSEEK)
    spec = replace(spec, names=replace(spec.names, expert_inputs_first=False))  # only checkpoints store them so
    model = decoder_of(spec, ops, dtype)
    (group,) = model.kv_groups
    assert group.planes == 1

    def logits(kv: TritonKVCache) -> torch.Tensor:
        found = []
        for (first, start), (second, other) in zip([(30, 0), (5, 30), (1, 35)], [(1, 0), (1, 1), (20, 2)], strict=True):
            batch: Batch = moved(batch_of([(first, start + first, [3, 1, 0]), (second, other + second, [2, 4])], BLOCK))
            ids = (batch.positions * 7 + 3) % spec.vocab_size
            found.append(model.logits(model.forward(replace(batch, token_ids=ids), [kv])))
        return torch.cat(found)

    once, twice = (logits(ops.new_kv_cache(replace(group, planes=planes), 5, BLOCK)) for planes in (1, 2))
    assert once.isfinite().all()
    assert once.std() > 0
    assert torch.equal(once, twice)
