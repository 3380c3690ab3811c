"""Paged attention against the reference in float64, and its bits under different batching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.worker.kernels.closeness import assert_close
from tests.worker.kernels.triton.support import (
    CPU,
    DEVICE,
    DTYPES,
    batch_of,
    moved,
    reference,
    shape_of,
    splitting,
    walking,
)

from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.kernels.triton import plan as planning
from pagoda_worker.kernels.triton.ops import TritonKVCache, TritonOps
from pagoda_worker.kernels.triton.plan import Tiles

# New tokens and context: length 1; ends of blocks, tiles and splits, and one beyond; chunks with and without a past.
RAGGED = [(1, 1), (1, 16), (5, 17), (1, 64), (1, 65), (40, 40), (1, 257), (3, 514), (1, 256)]
SHORT = [(1, 1), (20, 33), (1, 70)]


def fill(ops: TritonOps, keys: torch.Tensor) -> TritonKVCache:
    """A one-layer cache with keys [num_blocks, block_size, 2, Hkv, D]."""
    shape = KVShape(num_layers=1, num_kv_heads=keys.shape[3], head_dim=keys.shape[4], dtype=keys.dtype)
    kv = ops.new_kv_cache(shape, keys.shape[0], keys.shape[1])
    kv.storage[0].copy_(keys.permute(2, 0, 3, 1, 4))
    return kv


def compare(
    ops: TritonOps,
    rows: list[tuple[int, int]],
    shape: AttentionShape,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compare `ops` in `dtype` with the reference in float64, for rows of (new tokens, context length)."""
    needed = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(needed)).tolist()
    batch = batch_of(
        [(new, context, [order.pop() for _ in range(n)]) for (new, context), n in zip(rows, needed, strict=True)],
        block_size,
    )
    keys = torch.randn(sum(needed), block_size, 2, shape.num_kv_heads, shape.head_dim).to(dtype)
    query = (torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim) * 2).to(dtype)
    wide_shape = KVShape(num_layers=1, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=torch.float64)
    wide = reference.new_kv_cache(wide_shape, sum(needed), block_size)
    wide.layers[0][:-1] = keys.double()
    kv, there = fill(ops, keys), moved(batch)
    got = ops.attend(query.to(DEVICE), kv, 0, ops.plan(there, kv), shape, None if sinks is None else sinks.to(DEVICE))
    assert_close(got, reference.attend(query.double(), wide, 0, batch, shape, sinks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", [walking, splitting], ids=["walk", "split"])
def test_ragged_rows(ops: TritonOps, dtype: torch.dtype) -> None:
    compare(ops, RAGGED, shape_of(4, 2, 64), dtype)


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 16])
def test_heads_that_share_keys(ratio: int) -> None:
    compare(splitting, SHORT, shape_of(2 * ratio, 2, 64), torch.bfloat16)
    compare(splitting, [(1, 300), (2, 258)], shape_of(ratio, 1, 64), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    compare(walking, [(1, 1), (18, 66), (1, 300)], shape_of(2, 1, head_dim), dtype)


@pytest.mark.parametrize("block_size", [32, 48, 64, 128])
def test_block_sizes(block_size: int) -> None:
    compare(
        splitting, [(1, 1), (17, 129), (1, 300), (1, 64)], shape_of(2, 1, 64), torch.bfloat16, block_size=block_size
    )


@pytest.mark.parametrize("ops", [walking, splitting], ids=["walk", "split"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "variant", [{"window": 20}, {"window": 300}, {"softcap": 5.0}, {"softcap": 5.0, "window": 65}, {"window": 1}]
)
def test_windows_caps_and_sinks(variant: dict[str, float], sinks: bool, ops: TritonOps) -> None:
    weights = torch.randn(6) * 2 if sinks else None
    compare(ops, [(1, 1), (9, 70), (1, 520), (30, 30)], shape_of(6, 2, 64, **variant), torch.float32, sinks=weights)


def test_sinks_without_anything_else() -> None:
    compare(splitting, [(1, 1), (3, 20), (1, 400)], shape_of(6, 2, 64), torch.bfloat16, sinks=torch.randn(6) * 2)


def test_one_line_of_latents_for_all_heads() -> None:
    """Heads as long as those of DeepSeek's models, the longest of all."""
    compare(splitting, [(1, 1), (3, 20), (1, 300)], shape_of(5, 1, 576), torch.bfloat16)
    compare(walking, [(9, 70)], shape_of(5, 1, 576), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", [{}, {"window": 70, "softcap": 5.0}])
def test_bits_depend_on_nothing_but_the_row(variant: dict[str, float], dtype: torch.dtype) -> None:
    """Tokens of a row of 300, as decodes and chunks, in low and high tiles, walking or splitting, alone and batched."""
    shape, length = shape_of(3, 1, 80, **variant), 300
    query = (torch.randn(length, 3, 80) * 2).to(dtype).to(DEVICE)
    keys = torch.randn(24, 16, 2, 1, 80).to(dtype)
    blocks = torch.randperm(24)[:19].tolist()

    def run(ops: TritonOps, chunks: list[tuple[int, int]]) -> torch.Tensor:
        """Run chunks [start, end) of the row, each as a separate row."""
        kv = fill(ops, keys)
        batch = moved(batch_of([(end - start, end, blocks) for start, end in chunks], 16))
        return ops.attend(torch.cat([query[a:b] for a, b in chunks]), kv, 0, ops.plan(batch, kv), shape)

    high = TritonOps(DEVICE, Tiles(low=64, high=128, fill=0))
    whole = run(high, [(200, length)])
    places = [200, 201, 254, 255, 256, 257, 260, 299]
    picked = whole[[place - 200 for place in places]]
    for ops in (walking, splitting):
        assert torch.equal(run(ops, [(place, place + 1) for place in places]), picked)
        assert torch.equal(run(ops, [(299, 300)])[0], whole[99])
        assert torch.equal(run(ops, [(202, 205), (250, 260), (205, 206)]), whole[[2, 3, 4, *range(50, 60), 5]])
    assert torch.equal(run(walking, [(230, 290)]), whole[30:90])


@pytest.mark.parametrize("variant", [{}, {"window": 300}])
def test_a_plan_made_for_bounds_serves_all_lengths(variant: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a recording: lengths and blocks change in place, and two programs share the splits of a row."""
    monkeypatch.setattr(planning, "WAVES", 1)
    ops, shape = TritonOps(DEVICE, Tiles(low=16, high=64, fill=7)), shape_of(4, 2, 64, **variant)
    kv = fill(ops, torch.randn(50, 16, 2, 2, 64))
    bounds = moved(batch_of([(1, 800, list(range(50)))] * 3, 16))
    bounds = replace(bounds, device_lengths=torch.full((3,), 800, dtype=torch.int32, device=DEVICE))
    made = ops.plan(bounds, kv)
    for lengths in ([1, 800, 257], [513, 30, 256]):
        query = torch.randn(3, 4, 64).to(DEVICE)
        tables = [torch.randperm(50).tolist() for _ in lengths]
        bounds.lengths.copy_(torch.tensor(lengths))
        bounds.block_tables.copy_(torch.tensor(tables))
        now = moved(batch_of([(1, length, table) for length, table in zip(lengths, tables, strict=True)], 16))
        expected = walking.attend(query, kv, 0, walking.plan(now, kv), shape)
        assert torch.equal(ops.attend(query, kv, 0, made, shape), expected)


def test_what_lies_beyond_a_row_is_never_read() -> None:
    """Cache cells that no token of the row has written hold NaN."""
    shape = shape_of(2, 1, 64)
    keys = torch.full((4, 16, 2, 1, 64), torch.nan)
    keys[[1, 3]] = torch.randn(2, 16, 2, 1, 64)
    keys[3, 4:] = torch.nan
    kv = fill(walking, keys)
    query = torch.randn(1, 2, 64, device=DEVICE)
    for ops in (walking, splitting):
        batch = moved(batch_of([(1, 20, [1, 3])], 16))
        assert ops.attend(query, kv, 0, ops.plan(batch, kv), shape).isfinite().all()


@pytest.mark.parametrize("ops", [walking, splitting], ids=["walking", "splitting"])
def test_what_a_window_lets_go_is_never_read(ops: TritonOps) -> None:
    """Table entries behind the window name a block of NaN, since they may by then name another row's block."""
    shape, rows = shape_of(2, 1, 64, window=20), [(1, 200), (5, 130)]
    keys = torch.randn(23, 16, 2, 1, 64)
    keys[0] = torch.nan
    kv, query, found = fill(ops, keys), torch.randn(6, 2, 64, device=DEVICE), []
    for gone in (False, True):
        counts = [max(0, context - new - 20 - ops.lookback) // 16 * gone for new, context in rows]
        ids = list(range(1, 14)), list(range(14, 23))
        tables = [[0] * count + own[count:] for count, own in zip(counts, ids, strict=True)]
        batch = moved(batch_of([(*row, table) for row, table in zip(rows, tables, strict=True)], 16))
        found.append(ops.attend(query, kv, 0, ops.plan(batch, kv), shape))
    assert counts == [7, 2]
    assert torch.equal(*found)


def test_rows_without_new_tokens_are_skipped() -> None:
    shape, keys = shape_of(2, 1, 64), torch.randn(4, 16, 2, 1, 64)
    kv, query = fill(walking, keys), torch.randn(3, 2, 64, device=DEVICE)
    tables = torch.tensor([[0, 1], [2, 0], [1, 3]], dtype=torch.int32)
    batch = batch_of([(1, 20, [0, 1]), (2, 30, [1, 3])], 16)
    there = moved(batch)
    expected = walking.attend(query, kv, 0, walking.plan(there, kv), shape)
    plan = walking.plan(there, kv)
    plan.tables, plan.contexts = tables.to(DEVICE), torch.tensor([20, 9, 30], dtype=torch.int32, device=DEVICE)
    plan.query_starts, plan.query_lens = [0, 1, 1, 3], [1, 0, 2]
    assert torch.equal(walking.attend(query, kv, 0, plan, shape), expected)


def test_queries_are_read_through_their_strides() -> None:
    shape, kv = shape_of(2, 1, 64), fill(walking, torch.randn(2, 16, 2, 1, 64))
    batch = moved(batch_of([(3, 20, [1, 0])], 16))
    query = torch.randn(3, 4, 64, device=DEVICE)[:, 1:3]
    plan = walking.plan(batch, kv)
    assert torch.equal(
        walking.attend(query, kv, 0, plan, shape), walking.attend(query.contiguous(), kv, 0, plan, shape)
    )
    across = query.mT.contiguous().mT
    assert across.stride(-1) != 1
    assert torch.equal(walking.attend(across, kv, 0, plan, shape), walking.attend(query, kv, 0, plan, shape))


def test_tiles_are_cut_as_planned() -> None:
    kv = fill(TritonOps(CPU, Tiles(fill=0)), torch.zeros(2, 16, 2, 1, 64).bfloat16())
    batch = batch_of([(1, 5, [0]), (30, 32, [0, 1]), (4, 4, [1])], 16)
    plan = TritonOps(CPU, Tiles(low=16, high=64, fill=0)).plan(batch, kv)
    low, high = plan.work(4, 64)
    assert low.items.tolist() == [[0, 0, 1, 0], [2, 31, 4, 0]]
    assert (low.lines, low.used_lines) == (16, 16)
    assert high.items.tolist() == [[1, 1, 30, 16], [1, 1, 30, 0]]
    assert (high.lines, high.used_lines) == (64, 64)
    assert plan.work(4, 64)[0] is low
