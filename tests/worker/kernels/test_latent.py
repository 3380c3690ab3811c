"""Per-head linear layers, and latents as keys and values, on every CPU back end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.worker.kernels.backends import TOLERANCE, ops_of
from tests.worker.kernels.levels import levels

from pagoda_worker.checkpoints.rope import RopeShape, RotaryTable
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.kv_cache import KVCache, KVShape
from pagoda_worker.kernels.ops import AttentionShape, BackendError, Ops
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.rows.batch import batch_of_spans

pytestmark = pytest.mark.usefixtures("inference")

CPU, BLOCK = torch.device("cpu"), 16
reference = ReferenceOps(CPU)
RANK, TURNS, HEADS = 512, 64, 5
DIM = RANK + TURNS
SHAPE = AttentionShape(num_heads=HEADS, num_kv_heads=1, head_dim=DIM, scale=0.05)


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("heads", "n", "k"), [(3, 20, 40), (5, 576, 24), (2, 16, 96)])
def test_a_linear_layer_for_each_head(backend: tuple[str, torch.dtype], heads: int, n: int, k: int) -> None:
    name, dtype = backend
    weight, x = (numbers(heads, n, k) * k**-0.5).to(dtype), numbers(300, heads * k, seed=1).to(dtype)
    ops = ops_of(name, dtype)
    packed = ops.pack_heads(weight)
    got = ops.head_linear(x, packed).clone()
    expected = torch.einsum("thk,hnk->thn", x.double().view(300, heads, k), weight.double()).flatten(1)
    assert (got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]
    for rows in (slice(0, 1), slice(7, 10), slice(200, 300)):
        assert torch.equal(ops.head_linear(x[rows], packed), got[rows])
    assert torch.equal(ops_of(name, dtype, 3).head_linear(x, packed), got)


def shape_of(dtype: torch.dtype, planes: int, quantized: bool = False) -> KVShape:
    return KVShape(num_layers=1, num_kv_heads=1, head_dim=DIM, dtype=dtype, planes=planes, quantized=quantized)


class Rows:
    """Rows of (new tokens, context) whose queries and latents are drawn once, for all back ends."""

    rank, turns = RANK, TURNS

    def __init__(self, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
        self.rows, self.dtype, self.dim = rows, dtype, self.rank + self.turns
        self.shape = replace(SHAPE, head_dim=self.dim)
        self.total = sum(context for _, context in rows)
        self.query = numbers(self.total, HEADS * self.dim, seed=2).to(dtype)
        self.latent = numbers(self.total, self.rank, seed=3).to(dtype)
        self.turning = numbers(self.total, self.turns, seed=4).to(dtype)
        self.table = RotaryTable(RopeShape(theta=1e4, head_dim=self.dim, turning=self.turns), 2048, CPU)

    def wide(self) -> Rows:
        """The same rows in float64."""
        wide = type(self)(self.dtype, self.rows)
        wide.dtype = torch.float64
        wide.query, wide.latent, wide.turning = (one.double() for one in (self.query, self.latent, self.turning))
        return wide

    def attended(self, ops: Ops, count: int | None = None, planes: int = 2, quantized: bool = False) -> torch.Tensor:
        """Attention outputs of each row's new tokens, `count` of them per step (None: all)."""
        tables = self._tables()
        kept = replace(shape_of(self.dtype, planes, quantized), head_dim=self.dim)
        kv = ops.new_kv_cache(kept, int(tables.max()) + 1, BLOCK)
        self._step(ops, kv, [(0, context) for _, context in self.rows], tables)
        results = []
        for row, (new, context) in enumerate(self.rows):
            step = count or new
            for start in range(context - new, context, step):
                spans = [(0, 0)] * len(self.rows)
                spans[row] = (start, min(start + step, context))
                results.append(self._step(ops, kv, spans, tables))
        return torch.cat(results)

    def _tables(self) -> torch.Tensor:
        counts = [-(-context // BLOCK) for _, context in self.rows]
        tables, first = torch.zeros(len(counts), max(counts), dtype=torch.int32), 0
        for row, blocks in enumerate(counts):
            tables[row, :blocks] = torch.arange(first, first + blocks).flip(0)
            first += blocks
        return tables

    def _step(self, ops: Ops, kv: object, spans: list[tuple[int, int]], tables: torch.Tensor) -> torch.Tensor:
        used = [row for row, (start, end) in enumerate(spans) if end > start]
        batch = batch_of_spans([spans[row] for row in used], tables[used])
        blocks = torch.cat([tables[row, torch.arange(*spans[row]) // BLOCK] for row in used])
        batch = replace(batch, kv_indices=blocks.long() * BLOCK + batch.positions % BLOCK)
        begins = [sum(context for _, context in self.rows[:row]) for row in used]
        places = torch.cat([torch.arange(*spans[row]) + begin for row, begin in zip(used, begins, strict=True)])
        rotation = self.table.at(batch.positions)
        query, latent, turning = (one[places] for one in (self.query, self.latent, self.turning))
        query = ops.latent_write(query, latent, turning, rotation, kv, 0, batch.kv_indices)
        return ops.attend(query, kv, 0, ops.plan(batch, kv), self.shape).clone()


LENGTHS = [(1, 300), (9, 70), (1, 1), (3, 600)]


PLANES = (1, 2)


def outward_of(dtype: torch.dtype, rank: int = RANK, turns: int = TURNS) -> torch.Tensor:
    """Projects a head's latent values back [Hq, 20, D]; zero for the rotated dimensions."""
    outward = numbers(HEADS, 20, rank + turns, seed=5) * rank**-0.5
    outward[:, :, : turns // 2] = 0.0
    outward[:, :, (rank + turns) // 2 : rank // 2 + turns] = 0.0
    return outward.to(dtype)


def test_attention_over_latents_is_near_the_reference(backend: tuple[str, torch.dtype]) -> None:
    name, dtype = backend
    rows, ops = Rows(dtype, LENGTHS), ops_of(name, dtype)
    for planes in PLANES:
        expected = rows.wide().attended(reference, planes=planes)
        got = rows.attended(ops, planes=planes)
        assert (got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]


def test_its_bits_depend_on_no_chunks_and_no_threads(backend: tuple[str, torch.dtype]) -> None:
    name, dtype = backend
    rows, ops = Rows(dtype, LENGTHS), ops_of(name, dtype)
    for planes in PLANES:
        whole = rows.attended(ops, planes=planes)
        assert torch.equal(rows.attended(ops, 1, planes), whole)
        assert torch.equal(rows.attended(ops_of(name, dtype, 3), 2, planes), whole)


@pytest.mark.parametrize("count", [None, 1])
def test_what_leads_back_gives_the_same_bits_of_values_that_are_keys(
    backend: tuple[str, torch.dtype], count: int | None
) -> None:
    name, dtype = backend
    same_back(ops_of(name, dtype), dtype, count)


def test_what_leads_back_gives_the_same_bits_by_the_reference() -> None:
    same_back(reference, torch.bfloat16, None)
    same_back(reference, torch.bfloat16, 1)


def same_back(ops: Ops, dtype: torch.dtype, count: int | None) -> None:
    rows = Rows(dtype, LENGTHS)
    once, twice = (rows.attended(ops, count, planes) for planes in (1, 2))
    outward = ops.pack_heads(outward_of(dtype))
    expected = ops.head_linear(twice, outward)
    assert not torch.equal(once, twice)  # in the rotated dimensions
    assert torch.equal(ops.head_linear(once, outward), expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("ops", [AtenOps(CPU), reference], ids=lambda ops: ops.name)
def test_a_line_is_kept_once(ops: Ops, quantized: bool) -> None:
    """One plane holds the rotated key that two planes also hold, and takes the stated number of bytes."""
    rows = Rows(torch.float32, [(20, 20)])
    batch = batch_of_spans([(0, 20)], torch.arange(2, dtype=torch.int32)[None])
    caches = []
    for planes in (1, 2):
        shape = shape_of(torch.float32, planes, quantized)
        kv = ops.new_kv_cache(shape, 2, BLOCK)
        assert isinstance(kv, KVCache)
        assert sum(one.nbytes for one in (*kv.layers, *kv.scales)) == 3 * shape.bytes_per_block(BLOCK)
        rotation = rows.table.at(batch.positions)
        query = ops.latent_write(rows.query.clone(), rows.latent, rows.turning, rotation, kv, 0, batch.kv_indices)
        caches.append((kv.read(0, torch.arange(2)), kv.gather(0, torch.arange(2)).clone(), query.clone()))
    (read, gathered, query), (both, _, expected) = caches
    assert torch.equal(query, expected)
    assert read.shape == gathered.shape == both.shape
    assert torch.equal(gathered, read)
    assert torch.equal(read[:, :, 0], both[:, :, 0])
    assert torch.equal(read[:, :, 1], both[:, :, 0])
    assert not torch.equal(read[:, :, 1], both[:, :, 1])


def test_lines_in_int8_are_attended_to_as_the_reference_does() -> None:
    """The error is much smaller than the one that rounding the latents causes."""
    rows = Rows(torch.float32, LENGTHS)
    got = rows.attended(AtenOps(CPU), planes=1, quantized=True)
    assert torch.equal(rows.attended(AtenOps(CPU), 1, 1, True), got)
    expected = rows.attended(reference, planes=1, quantized=True)
    rounding = (rows.attended(reference, planes=1) - expected).abs().mean()
    assert (got - expected).abs().mean() < 0.01 * rounding


def test_values_of_their_own_are_what_keys_are_before_they_turn() -> None:
    """Half of the rotary part, half of the latent, then the other halves."""
    kv = reference.new_kv_cache(shape_of(torch.float32, 2), 1, BLOCK)
    rows = Rows(torch.float32, [(3, 3)])
    batch = batch_of_spans([(0, 3)], torch.zeros(1, 1, dtype=torch.int32))
    rotation = rows.table.at(batch.positions)
    reference.latent_write(rows.query, rows.latent, rows.turning, rotation, kv, 0, batch.kv_indices)
    key, value = kv.read(0, torch.tensor([0])).flatten(0, 1)[:3].unbind(1)
    turns, still = TURNS // 2, RANK // 2
    first = torch.cat((rows.turning[:, :turns], rows.latent[:, :still]), 1)
    expected = torch.cat((first, rows.turning[:, turns:], rows.latent[:, still:]), 1)
    assert torch.equal(value[:, 0], expected)
    assert torch.equal(key[0, 0], expected[0])  # no rotation at position 0
    assert torch.equal(key[:, 0, turns : turns + still], expected[:, turns : turns + still])
    assert not torch.equal(key[2, 0], expected[2])


@pytest.mark.parametrize("level", levels()[-1:])
def test_latents_as_whole_numbers_are_refused_where_sums_would_overflow(level: str) -> None:
    kept = shape_of(torch.bfloat16, 2, quantized=True)
    with pytest.raises(BackendError, match="int8 KV cache for heads of up to 256 dimensions, not 576"):
        ops_of(level, torch.bfloat16).new_kv_cache(kept, 2, BLOCK)


class Thin(Rows):
    """A size that tiles of the matrix unit do not support and that is laid out in one pass; also used with int8."""

    rank, turns = 32, 16


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("count", [None, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_narrow_lines_kept_once_by_the_native_kernels(level: str, count: int | None, quantized: bool) -> None:
    """Close to the reference; in bfloat16 the projected values also have the bits that two planes give."""
    rows, ops = Thin(torch.bfloat16, LENGTHS), ops_of(level, torch.bfloat16)
    once = rows.attended(ops, count, 1, quantized)
    expected = rows.wide().attended(reference, None, 1, quantized)
    assert (once.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[torch.bfloat16]
    assert torch.equal(rows.attended(ops, 5, 1, quantized), once)
    assert torch.equal(rows.attended(ops_of(level, torch.bfloat16, 3), count, 1, quantized), once)
    if not quantized:
        outward = ops.pack_heads(outward_of(torch.bfloat16, rows.rank, rows.turns))
        twice = rows.attended(ops, count, 2)
        assert torch.equal(ops.head_linear(once, outward), ops.head_linear(twice, outward))


@pytest.mark.parametrize("level", levels())
def test_what_lies_behind_a_line_that_is_kept_once_is_nobodys(level: str) -> None:
    """A reused block may contain NaN: the tokens in it that have not been written must not be read."""
    ops, rows = ops_of(level, torch.bfloat16), Rows(torch.bfloat16, [(37, 37)])
    batch = batch_of_spans([(0, 37)], torch.arange(3, dtype=torch.int32)[None])
    results = []
    for before in (0.0, torch.nan):
        kv: Any = ops.new_kv_cache(shape_of(torch.bfloat16, 1), 3, BLOCK)
        for tensor in kv.tensors:
            tensor.fill_(before)
        given = rows.query.clone(), rows.latent, rows.turning, rows.table.at(batch.positions)
        query = ops.latent_write(*given, kv, 0, batch.kv_indices)
        results.append(ops.attend(query, kv, 0, ops.plan(batch, kv), SHAPE).clone())
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("level", levels()[-1:])
def test_the_native_cache_takes_what_is_said(level: str) -> None:
    ops = ops_of(level, torch.bfloat16)
    for planes in (1, 2):
        shape = shape_of(torch.bfloat16, planes)
        kv: Any = ops.new_kv_cache(shape, 3, BLOCK)
        assert sum(one.nbytes for one in kv.tensors) == 3 * shape.bytes_per_block(BLOCK)
