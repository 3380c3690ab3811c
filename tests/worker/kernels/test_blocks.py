"""Copying blocks within a cache, and moving them between the caches of different back ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.worker.kernels.levels import levels
from tests.worker.models.harness import make_batch

from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.kv_cache import Blocks, KVCache, KVShape
from pagoda_worker.kernels.ops import AttentionShape, Ops
from pagoda_worker.kernels.reference import ReferenceOps

pytestmark = pytest.mark.usefixtures("inference")

CPU = torch.device("cpu")
LAYERS, KV_HEADS, DIM, BLOCK, NUM_BLOCKS = 3, 2, 32, 16, 8
ATTENTION = AttentionShape(num_heads=6, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
NAMES = ["reference", "torch", *(["native"] if levels() else [])]


@pytest.fixture(scope="module")
def back_ends() -> Iterator[dict[str, Ops]]:
    found: dict[str, Ops] = {"reference": ReferenceOps(CPU), "torch": AtenOps(CPU)}
    if "native" in NAMES:
        native = NativeOps(Library([-1, -1]))
        yield found | {"native": native}
        native.library.close()
    else:
        yield found


def shape(quantized: bool) -> KVShape:
    return KVShape(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16, quantized=quantized)


def written(ops: Ops, quantized: bool, seed: int = 0, of: KVShape | None = None) -> object:
    """A cache with random numbers in all of its blocks."""
    kv = ops.new_kv_cache(of or shape(quantized), NUM_BLOCKS, BLOCK)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        k, v = torch.randn(2, NUM_BLOCKS * BLOCK, KV_HEADS, DIM, generator=generator).bfloat16().unbind(0)
        ops.write_kv(k, v, kv, layer, torch.arange(NUM_BLOCKS * BLOCK))
    return kv


def same(a: Blocks, b: Blocks) -> bool:
    if (a.scales is None) != (b.scales is None) or not torch.equal(a.cells, b.cells):
        return False
    return a.scales is None or b.scales is None or torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_copies_read_before_they_write(back_ends: dict[str, Ops], name: str, quantized: bool) -> None:
    """Chains and a swap, in one call, over all layers."""
    ops = back_ends[name]
    kv = written(ops, quantized)
    before = ops.export_blocks(kv, range(NUM_BLOCKS))
    ops.copy_blocks(kv, [(0, 1), (1, 2), (2, 3), (5, 6), (6, 5), (0, 7)])
    after = ops.export_blocks(kv, range(NUM_BLOCKS))
    assert same(after, ops.export_blocks(written(ops, quantized), [0, 0, 1, 2, 4, 6, 5, 0]))
    assert not torch.equal(after.cells[3], before.cells[3])


def test_no_copies_are_no_work(back_ends: dict[str, Ops]) -> None:
    for ops in back_ends.values():
        ops.copy_blocks(written(ops, False), [])


@pytest.mark.parametrize("quantized", [False, True])
def test_every_back_end_exports_the_same(back_ends: dict[str, Ops], quantized: bool) -> None:
    expected = back_ends["reference"].export_blocks(written(back_ends["reference"], quantized), [5, 0, 3])
    assert expected.cells.shape == (3, 2, LAYERS, KV_HEADS, BLOCK, DIM)
    assert (expected.scales is not None) == quantized
    for ops in back_ends.values():
        assert same(ops.export_blocks(written(ops, quantized), [5, 0, 3]), expected)


def test_what_is_exported_lies_where_the_layout_says(back_ends: dict[str, Ops]) -> None:
    for ops in back_ends.values():
        kv = ops.new_kv_cache(shape(False), NUM_BLOCKS, BLOCK)
        k, v = torch.randn(2, BLOCK, KV_HEADS, DIM).bfloat16().unbind(0)
        ops.write_kv(k, v, kv, 1, torch.arange(2 * BLOCK, 3 * BLOCK))
        out = ops.export_blocks(kv, [1, 2]).cells
        assert torch.equal(out[1, 0, 1], k.transpose(0, 1))
        assert torch.equal(out[1, 1, 1], v.transpose(0, 1))
        assert out[1, :, [0, 2]].count_nonzero() == out[0].count_nonzero() == 0


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_blocks_that_moved_are_attended_to_as_if_written_here(
    back_ends: dict[str, Ops], source: str, target: str, quantized: bool
) -> None:
    ops, other = back_ends[target], back_ends[source]
    moved = written(ops, quantized, seed=9)
    ops.import_blocks(moved, [4, 1, 6], other.export_blocks(written(other, quantized), [0, 1, 2]))
    query = torch.randn(5, 6, DIM).bfloat16()
    here, there = (make_batch([([0] * 5, 36, blocks)], BLOCK) for blocks in ([0, 1, 2], [4, 1, 6]))
    computed = written(ops, quantized)
    for layer in range(LAYERS):
        expected = ops.attend(query, computed, layer, ops.plan(here, computed), ATTENTION).clone()
        assert torch.equal(ops.attend(query, moved, layer, ops.plan(there, moved), ATTENTION), expected)
    untouched = ops.export_blocks(moved, [0, 2, 3, 5, 7])
    assert same(untouched, ops.export_blocks(written(ops, quantized, seed=9), [0, 2, 3, 5, 7]))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_blocks_of_one_plane_move_likewise(
    back_ends: dict[str, Ops], source: str, target: str, quantized: bool
) -> None:
    ops, other = back_ends[target], back_ends[source]
    once = replace(shape(quantized), planes=1)
    exported = other.export_blocks(written(other, quantized, of=once), [0, 1, 2])
    assert exported.cells.shape == (3, 1, LAYERS, KV_HEADS, BLOCK, DIM)
    assert (None if exported.scales is None else exported.scales.shape) == (
        exported.cells.shape[:-1] if quantized else None
    )
    both = other.export_blocks(written(other, quantized), [0, 1, 2])
    assert torch.equal(exported.cells, both.cells[:, :1])
    moved = written(ops, quantized, seed=9, of=once)
    ops.import_blocks(moved, [4, 1, 6], exported)
    ops.copy_blocks(moved, [(4, 1), (1, 4)])
    assert same(ops.export_blocks(moved, [1, 4, 6]), exported)
    untouched = ops.export_blocks(moved, [0, 2, 3, 5, 7])
    assert same(untouched, ops.export_blocks(written(ops, quantized, seed=9, of=once), [0, 2, 3, 5, 7]))
    for planes, blocks in ((2, exported), (1, both)):
        with pytest.raises(ValueError, match="do not fit"):
            ops.import_blocks(written(ops, quantized, of=replace(once, planes=planes)), [0, 1, 2], blocks)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_do_not_fit_are_refused_and_change_nothing(back_ends: dict[str, Ops], name: str) -> None:
    ops = back_ends[name]
    plain, rounded = (ops.export_blocks(written(ops, quantized), [0, 1]) for quantized in (False, True))
    assert rounded.scales is not None
    wrong = {
        "dtype": (False, rounded, [0, 1]),
        "no scales": (True, replace(rounded, scales=None), [0, 1]),
        "scales": (False, replace(plain, scales=rounded.scales), [0, 1]),
        "count": (False, plain, [0, 1, 2]),
        "layers": (False, replace(plain, cells=plain.cells[:, :, :2]), [0, 1]),
        "scale shape": (True, replace(rounded, scales=rounded.scales[..., :8]), [0, 1]),
    }  # fmt: skip
    for case, (quantized, blocks, ids) in wrong.items():
        kv = written(ops, quantized)
        before = ops.export_blocks(kv, range(NUM_BLOCKS))
        with pytest.raises(ValueError, match="do not fit"):
            ops.import_blocks(kv, ids, blocks)
        assert same(ops.export_blocks(kv, range(NUM_BLOCKS)), before), case


@pytest.mark.parametrize("quantized", [False, True])
def test_quarantine_follows_copies_and_imports(back_ends: dict[str, Ops], quantized: bool) -> None:
    ops = back_ends["torch"]
    kv = written(ops, quantized)
    assert isinstance(kv, KVCache)
    kv.quarantined = {1, 5}
    ops.copy_blocks(kv, [(0, 1), (1, 2)])  # block 2 gets what was in block 1
    assert kv.quarantined == {2, 5}
    bad = torch.ones(BLOCK, KV_HEADS, DIM).bfloat16()
    bad[3, 0, 0] = torch.nan
    other = written(ops, quantized)
    ops.write_kv(bad, bad, other, 1, torch.arange(BLOCK))
    ops.import_blocks(kv, [2, 3], ops.export_blocks(other, [1, 0]))
    assert kv.quarantined == {3, 5}
    ops.import_blocks(kv, [3], ops.export_blocks(other, [1]))
    assert kv.quarantined == {5}
