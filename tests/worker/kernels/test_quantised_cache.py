"""int8 keys and values: every back end writes them by one definition; attention is close to plain float64, and bit for
bit the same under everything that must not matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.worker.kernels.levels import levels
from tests.worker.models.harness import make_batch

from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.kv_cache import KVCache, KVShape, dequantize, quantize
from pagoda_worker.kernels.ops import AttentionShape, HeadNorm, Ops, Rotation
from pagoda_worker.kernels.reference import ReferenceOps

pytestmark = pytest.mark.usefixtures("inference")

CPU = torch.device("cpu")
BLOCKS = 160
BF16_NAN = 0x7FC0


@pytest.fixture(scope="module", params=[*levels(), "torch"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    if request.param == "torch":
        yield AtenOps(CPU)
        return
    native = NativeOps(Library([-1, -1], request.param))
    yield native
    native.library.close()


def kv_shape(kv_heads: int, dim: int, quantized: bool = True, layers: int = 1) -> KVShape:
    return KVShape(num_layers=layers, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16, quantized=quantized)


# --- the definition ---------------------------------------------------------------------------------------------------


def test_the_definition_on_numbers_checked_by_hand() -> None:
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 2.49], [0.0] * 6, [254.0, 1.0, 3.0, -1.0, 0.0, 5.0]])
    levels, scales = quantize(x)
    assert levels.dtype == torch.int8
    assert scales.tolist() == [1.0, 0.0, 2.0]
    assert levels.tolist() == [[127, -127, 0, 2, -2, 2], [0] * 6, [127, 0, 2, 0, 0, 2]]
    assert torch.equal(dequantize(levels, scales)[2], torch.tensor([254.0, 0.0, 4.0, 0.0, 0.0, 4.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_line_that_is_no_number_stays_one(bad: float) -> None:
    levels, scales = quantize(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert scales.isnan().tolist() == [True, False]
    assert levels[0].tolist() == [0, 0]
    assert dequantize(levels, scales)[0].isnan().all()


def test_the_error_is_at_most_half_a_level() -> None:
    x = torch.randn(500, 64) * torch.logspace(-20, 20, 500)[:, None]
    levels, scales = quantize(x)
    assert ((dequantize(levels, scales) - x).abs() <= scales[:, None] * 0.5001).all()


def lines(count: int, heads: int, dim: int) -> torch.Tensor:
    """Keys or values of all magnitudes, with ties, zeros, tiny numbers, NaN and infinities."""
    x = torch.randn(count, heads, dim) * torch.logspace(-6, 6, count)[:, None, None]
    x[1], x[2], x[3] = 0.0, 9.2e-41, torch.randint(-254, 255, (heads, dim)) / 2
    x[3, :, 0] = 127.0
    x[4, 0, 1], x[5, 0, dim - 1], x[6, 0, 3] = math.nan, math.inf, -math.inf
    return x.bfloat16()


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_what_is_written_is_the_definition_exactly(ops: Ops, dim: int) -> None:
    key, value = lines(64, 3, dim), lines(64, 3, dim).flip(0)
    kv = ops.new_kv_cache(kv_shape(3, dim), 4, 16)
    ops.write_kv(key, value, kv, 0, torch.arange(64))
    written = ops.export_blocks(kv, [0, 1, 2, 3])
    assert written.scales is not None
    for kind, x in enumerate((key, value)):
        cells, scales = quantize(x)
        assert torch.equal(written.cells[:, kind, 0].transpose(1, 2).flatten(0, 1), cells)
        assert torch.equal(written.scales[:, kind, 0].transpose(1, 2).flatten(0, 1).nan_to_num(7), scales.nan_to_num(7))


@pytest.mark.parametrize("normed", [False, True])
def test_keys_are_rounded_after_norm_and_rotation(ops: Ops, normed: bool) -> None:
    heads, kv_heads, dim, count = 6, 2, 80, 40
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim).bfloat16()
    angles = torch.rand(64, dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin(), torch.randint(0, 64, (count,)))
    norm = HeadNorm(weight=torch.randn(heads + kv_heads, dim), eps=1e-6) if normed else None
    places, exported, queries = torch.arange(11, 11 + count), [], []
    for quantized in (False, True):
        kv = ops.new_kv_cache(kv_shape(kv_heads, dim, quantized), 4, 16)
        queries.append(ops.rope_write(qkv.clone(), rotation, norm, kv, 0, places).clone())
        exported.append(ops.export_blocks(kv, [0, 1, 2, 3]))
    plain, rounded = exported
    assert rounded.scales is not None
    assert torch.equal(*queries)
    cells, scales = quantize(plain.cells.transpose(3, 4))
    mask = torch.zeros(64, dtype=torch.bool).index_fill_(0, places, True).view(4, 1, 1, 16, 1)
    assert torch.equal(rounded.cells.transpose(3, 4) * mask[..., None], cells * mask[..., None])
    assert torch.equal(rounded.scales.transpose(3, 4) * mask, scales * mask)


# --- attention --------------------------------------------------------------------------------------------------------


class Case:
    """Rows of (new tokens, context) over a cache full of garbage, with scattered blocks."""

    def __init__(
        self, ops: Ops, rows: list[tuple[int, int]], shape: AttentionShape, block: int, quantized: bool = True
    ) -> None:
        self.ops, self.rows, self.shape, self.block = ops, rows, shape, block
        self.kv = ops.new_kv_cache(kv_shape(shape.num_kv_heads, shape.head_dim, quantized), BLOCKS, block)
        fill_with_garbage(self.kv)
        order = torch.randperm(BLOCKS).tolist()
        self.tables, self.q, self.k, self.v = [], [], [], []
        for new, context in rows:
            self.tables.append([order.pop() for _ in range(-(-context // block))])
            self.q.append((torch.randn(new, shape.num_heads, shape.head_dim) * 2).bfloat16())
            k, v = (torch.randn(context, shape.num_kv_heads, shape.head_dim).bfloat16() for _ in range(2))
            self.k.append(k)
            self.v.append(v)
            batch = self.batch([(len(self.tables) - 1, context)])
            ops.write_kv(k, v, self.kv, 0, batch.kv_indices)

    def batch(self, queries: list[tuple[int, int]]) -> Any:
        parts = [([0] * count, self.rows[row][1] - count, self.tables[row]) for row, count in queries]
        return make_batch(parts, self.block)

    def attend(self, *queries: tuple[int, int], sinks: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Outputs for each (row, number of its last tokens), from one call."""
        batch = self.batch(list(queries))
        q = torch.cat([self.q[row][-count:] for row, count in queries])
        out = self.ops.attend(q, self.kv, 0, self.ops.plan(batch, self.kv), self.shape, sinks).clone()
        return list(out.split([count for _, count in queries]))

    def expected(self, row: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """Plain float64 attention over the dequantised cache."""
        k, v = (dequantize(*quantize(t[row])) for t in (self.k, self.v))
        return plainly(self.shape, self.q[row], k, v, sinks)


def plainly(
    shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of the last tokens, q [new, Hq, D], over k and v [context, Hkv, D], in float64."""
    new, context = len(q), len(k)
    k, v = (t.double().repeat_interleave(shape.num_heads // shape.num_kv_heads, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * shape.scale
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    at, key = torch.arange(context - new, context)[:, None], torch.arange(context)[None]
    seen = (key <= at) & (key > at - (shape.window or context + 1))
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], -1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., :context], v).flatten(1)


def fill_with_garbage(kv: Any) -> None:
    """Garbage as earlier requests may leave it: any integers; on the native kernels also NaN scales."""
    tensors = [*kv.layers] if isinstance(kv, KVCache) else kv.tensors
    for tensor in tensors:
        if tensor.dtype == torch.int8:
            tensor.random_(-128, 128)
        else:
            tensor.fill_(torch.nan)


def attention(heads: int, kv_heads: int, dim: int, **changes: float) -> AttentionShape:
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        **changes,  # type: ignore[arg-type]
    )


CASES = {
    "group1-dim80": (attention(2, 2, 80), [(1, 100), (20, 70), (1, 16)], 16),
    "group2-dim128": (attention(16, 8, 128), [(1, 512), (64, 64), (3, 513)], 32),
    "group3-dim64": (attention(9, 3, 64), [(1, 1), (1, 33), (5, 5), (40, 300), (1, 600), (7, 257)], 32),
    "group4-dim256-softcap": (attention(4, 1, 256, softcap=30.0), [(1, 100), (20, 70), (1, 290)], 32),
    "group7-dim64": (attention(14, 2, 64), [(1, 100), (20, 700), (13, 270)], 16),
    "group16-dim96-window": (attention(16, 1, 96, window=128), [(1, 1000), (30, 270)], 48),
    "window-softcap-sinks": (attention(4, 2, 64, window=20, softcap=10.0), [(1, 1000), (30, 270), (1, 2)], 32),
    "window-over-splits": (attention(4, 2, 64, window=300), [(1, 1000), (290, 700), (1, 301)], 16),
}


def made(ops: Ops, name: str) -> tuple[Case, torch.Tensor | None]:
    shape, rows, block = CASES[name]
    return Case(ops, rows, shape, block), torch.randn(shape.num_heads) * 2 if "sinks" in name else None


@pytest.mark.parametrize("name", CASES)
def test_attention(ops: Ops, name: str) -> None:
    case, sinks = made(ops, name)
    outputs = case.attend(*[(row, new) for row, (new, _) in enumerate(case.rows)], sinks=sinks)
    for row, output in enumerate(outputs):
        torch.testing.assert_close(output.double(), case.expected(row, sinks), rtol=2e-2, atol=1.5e-2)


def outliers(kind: str, count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors for the channels of queries [dim], for those of keys [dim], and for the values of tokens [count]."""
    query, key, value = torch.ones(dim), torch.ones(dim), torch.ones(count)
    if kind == "queries":
        query[3::29] = 60.0
    if kind == "keys and values":
        key[5::31] = 40.0
        value[::37] = 100.0
    return query, key, value


@pytest.mark.parametrize("ops", levels(), indirect=True)  # torch rounds keys to bfloat16 once more
@pytest.mark.parametrize("kind", ["none", "queries", "keys and values"])
def test_the_error_of_attention_is_that_of_the_cache(ops: Ops, kind: str) -> None:
    """Against float64 over the numbers before quantisation: the operands that meet them are rounded too, but that error
    is negligible beside those of the cache and of the result in bfloat16."""
    shape, context = attention(4, 2, 64), 300
    query, key, value = outliers(kind, context, 64)
    q = torch.randn(20, 4, 64) * query
    q = (q / (q @ (torch.randn(64) * key)).std() * 24).bfloat16()  # so that scores have a standard deviation of 3
    k, v = (
        (torch.randn(context, 2, 64) * key).bfloat16(),
        (torch.randn(context, 2, 64) * value[:, None, None]).bfloat16(),
    )
    kv = ops.new_kv_cache(kv_shape(2, 64), 32, 16)
    batch = make_batch([([0] * 20, context - 20, list(range(32)))], 16)
    ops.write_kv(k, v, kv, 0, torch.arange(context))
    got = ops.attend(q, kv, 0, ops.plan(batch, kv), shape).double()
    exact, rounded = (plainly(shape, q, *pair) for pair in ((k, v), (dequantize(*quantize(t)) for t in (k, v))))
    allowed = (rounded - exact).square().mean().sqrt() + exact.square().mean().sqrt() * 2**-8
    assert (got - exact).square().mean().sqrt() < allowed
    assert (got - rounded).square().mean().sqrt() < exact.square().mean().sqrt() * 2**-7


@pytest.mark.parametrize("name", CASES)
def test_attention_bits_depend_neither_on_company_nor_on_chunking(ops: Ops, name: str) -> None:
    case, sinks = made(ops, name)
    together = case.attend(*[(row, new) for row, (new, _) in enumerate(case.rows)], sinks=sinks)
    for row, (new, _) in enumerate(case.rows):
        for count in {1, min(3, new), min(17, new), new}:
            assert torch.equal(case.attend((row, count), sinks=sinks)[0], together[row][-count:])


def test_reference_attends_to_the_same_numbers() -> None:
    case, _ = made(ReferenceOps(CPU), "group3-dim64")
    for row, (new, _) in enumerate(case.rows):
        torch.testing.assert_close(case.attend((row, new))[0].double(), case.expected(row, None), rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(not levels(), reason="no C++ compiler on this machine; the torch back end serves")
@pytest.mark.parametrize("quantized", [False, True])
def test_threads_change_nothing(quantized: bool) -> None:
    """Nor does any other division of the work: 290 tokens by 7 heads give many work items."""
    q = torch.randn(290, 14, 64).bfloat16()
    k, v = torch.randn(2, 290, 2, 64).bfloat16().unbind(0)
    batch, outputs = make_batch([([0] * 290, 0, list(range(19)))], 16), []
    for threads in (1, 2, 3):
        native = NativeOps(Library([-1] * threads))
        kv = native.new_kv_cache(kv_shape(2, 64, quantized), 19, 16)
        native.write_kv(k, v, kv, 0, batch.kv_indices)
        outputs.append(native.attend(q, kv, 0, native.plan(batch, kv), attention(14, 2, 64)))
        native.library.close()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


SHARED = {
    "one-kv-head": (attention(4, 1, 64), [(1, 1500)]),
    "beside-short-ones": (attention(4, 2, 64), [(1, 20), (1, 1500), (3, 3), (1, 257)]),
    "verified-drafts": (attention(3, 1, 64), [(5, 1026), (2, 700)]),
    "prefill-beside": (attention(2, 1, 64), [(30, 300), (1, 1200)]),
    "window": (attention(6, 1, 64, window=300), [(3, 1030), (1, 900)]),
    "softcap-sinks": (attention(2, 1, 80, softcap=10.0), [(1, 1100)]),
}


@pytest.mark.skipif(not levels(), reason="no C++ compiler on this machine; the torch back end serves")
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_it_changes_nothing_how_threads_share_the_keys_of_a_row(name: str, quantized: bool) -> None:
    """One thread splits no row, and neither do several with many rows; two and five threads split a row differently."""
    (shape, rows), outputs = SHARED[name], []
    sinks = torch.randn(shape.num_heads) if "sinks" in name else None
    for threads in (1, 2, 5):
        torch.manual_seed(3)
        native = NativeOps(Library([-1] * threads))
        case = Case(native, rows, shape, 16, quantized)
        queries = [(row, new) for row, (new, _) in enumerate(rows)]
        outputs.append(torch.cat(case.attend(*queries, sinks=sinks)))
        # What an operation leaves behind must not affect the next one.
        again = torch.cat(case.attend(*queries, sinks=sinks))
        assert torch.equal(again, outputs[0])
        many = case.attend(*queries * 20, sinks=sinks)
        assert torch.equal(torch.cat(many[: len(rows)]), outputs[0])
        native.library.close()


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bad", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_token_that_is_no_number_reaches_whoever_attends_to_it(
    level: str, quantized: bool, bad: int, softcap: float
) -> None:
    """NaN must not be rounded away: attention that sees it returns NaN, and earlier positions stay untouched."""
    native = NativeOps(Library([-1], level))
    both = torch.randn(2, 40, 2, 64).bfloat16()
    both[bad, 20] = torch.nan
    k, v = both
    batch = make_batch([([0] * 40, 0, [0, 1, 2])], 16)
    kv = native.new_kv_cache(kv_shape(2, 64, quantized), 3, 16)
    native.write_kv(k, v, kv, 0, batch.kv_indices)
    q = torch.randn(40, 4, 64).bfloat16()
    for position, expected in ((19, False), (20, True), (39, True)):
        one = make_batch([([0], position, [0, 1, 2])], 16)
        out = native.attend(
            q[position : position + 1], kv, 0, native.plan(one, kv), attention(4, 2, 64, softcap=softcap)
        )
        assert bool(out.isnan().all()) == expected
        assert bool(out.isnan().any()) == expected
    native.library.close()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True])
def test_bytes_per_block_are_those_that_are_taken(ops: Ops, quantized: bool) -> None:
    shape = kv_shape(3, 64, quantized, layers=2)
    kv: Any = ops.new_kv_cache(shape, 5, 32)
    tensors = [*kv.layers, *kv.scales] if isinstance(kv, KVCache) else kv.tensors
    spare = 1 if isinstance(kv, KVCache) else 0  # the block of zeros
    assert sum(tensor.nbytes for tensor in tensors) == (5 + spare) * shape.bytes_per_block(32)
