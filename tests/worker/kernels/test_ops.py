"""The torch back end against the reference, which computes in float64, operation by operation."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.worker.kernels.closeness import assert_close
from tests.worker.models.harness import make_batch

from pagoda_worker.kernels import aten
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.kv_cache import KVCache, KVShape
from pagoda_worker.kernels.ops import ACTIVATIONS, AttentionShape, BackendError, HeadNorm, Needs, Rotation
from pagoda_worker.kernels.quantized import FORMATS, dequantize, quantize
from pagoda_worker.kernels.reference import ReferenceOps

pytestmark = pytest.mark.usefixtures("inference")

CPU = torch.device("cpu")
BLOCK = 16
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

tuned, reference = AtenOps(CPU), ReferenceOps(CPU)


def fill(ops: AtenOps | ReferenceOps, dtype: torch.dtype, keys: torch.Tensor) -> KVCache:
    """A one-layer cache with keys [num_blocks * BLOCK, 2, Hkv, D]."""
    shape = KVShape(num_layers=1, num_kv_heads=keys.shape[2], head_dim=keys.shape[3], dtype=dtype)
    kv = ops.new_kv_cache(shape, len(keys) // BLOCK, BLOCK)
    kv.lines[0][: len(keys)] = keys.flatten(1).to(dtype)
    return kv


def both(rows: list[tuple[int, int]], shape: AttentionShape, dtype: torch.dtype, sinks: torch.Tensor | None = None):
    """Attention over rows of (new tokens, context length): torch in `dtype`, and the reference in float64."""
    needed = [-(-context // BLOCK) for _, context in rows]
    order = torch.randperm(sum(needed)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    parts = zip(rows, tables, strict=True)
    batch = make_batch([([0] * new, context - new, blocks) for (new, context), blocks in parts], BLOCK)
    keys = torch.randn(sum(needed) * BLOCK, 2, shape.num_kv_heads, shape.head_dim).to(dtype)
    query = (torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim) * 2).to(dtype)
    kv, wide = fill(tuned, dtype, keys), fill(reference, torch.float64, keys)
    got = tuned.attend(query, kv, 0, tuned.plan(batch, kv), shape, sinks)
    return got, reference.attend(query.double(), wide, 0, batch, shape, sinks)


def shape_of(heads: int, kv_heads: int, head_dim: int, **changes: float | None) -> AttentionShape:
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        **changes,  # type: ignore[arg-type]
    )


RAGGED = [(1, 1), (1, 16), (5, 17), (1, 64), (1, 65), (130, 130), (1, 200), (3, 515), (1, 513), (1, 33)]
VARIANTS = [{}, {"window": 20}, {"window": 600}, {"softcap": 5.0}, {"softcap": 5.0, "window": 20}]


@pytest.mark.parametrize("ops", [tuned, reference], ids=lambda ops: ops.name)
def test_attention_reads_nothing_that_a_window_lets_go(ops: AtenOps | ReferenceOps) -> None:
    """Table entries behind the window name a block of NaN, since they may by then name another row's block."""
    rows, shape = [(1, 200), (5, 130), (1, 64), (1, 21), (40, 600)], shape_of(4, 2, 64, window=20)
    needed = [-(-context // BLOCK) for _, context in rows]
    order = (torch.randperm(sum(needed)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    keys = torch.randn((sum(needed) + 1) * BLOCK, 2, 2, 64)
    keys[:BLOCK] = torch.nan
    kv, found = fill(ops, torch.float32, keys), []
    query = torch.randn(sum(new for new, _ in rows), 4, 64)
    for gone in (False, True):
        for table, (new, context) in zip(tables, rows, strict=True):
            count = max(0, context - new - 20 - ops.lookback) // BLOCK
            table[:count] = [0] * count if gone else table[:count]
        parts = [([0] * new, context - new, table) for (new, context), table in zip(rows, tables, strict=True)]
        batch = make_batch(parts, BLOCK)
        found.append(ops.attend(query, kv, 0, ops.plan(batch, kv), shape))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ratio", "head_dim"), [*itertools.product((1, 2, 3, 4, 7), (64,)), *itertools.product((2,), (80, 96, 128, 256))]
)
def test_attention_of_ragged_rows(ratio: int, head_dim: int, dtype: torch.dtype) -> None:
    assert_close(*both(RAGGED, shape_of(2 * ratio, 2, head_dim), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_caps_and_sinks(variant: dict[str, float], sinks: bool, dtype: torch.dtype) -> None:
    weights = torch.randn(6) * 2 if sinks else None
    assert_close(*both(RAGGED, shape_of(6, 2, 64, **variant), dtype, weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[(1, 1)], [(1, 16)], [(1, 128)], [(300, 300)], [(1, 700), (1, 700)], [(2, 1025)]])
def test_attention_of_one_kind_of_row(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    assert_close(*both(rows, shape_of(6, 2, 64), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [{}, {"window": 40}, {"softcap": 5.0}])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_attention_bits_do_not_depend_on_chunks_or_neighbours(
    head_dim: int, variant: dict[str, float], dtype: torch.dtype
) -> None:
    """Compares every token of a row of 700, decoded alone, with chunks of several sizes beside other rows."""
    shape, length = shape_of(6, 2, head_dim, **variant), 700
    keys = torch.randn(64 * BLOCK, 2, 2, head_dim)
    kv = fill(tuned, dtype, keys)
    query = (torch.randn(length, 6, head_dim) * 2).to(dtype)
    blocks = torch.randperm(60)[: -(-length // BLOCK)].tolist()

    def run(chunks: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Run chunks [start, end) of the row, each as a separate row."""
        batch = make_batch([([0] * (end - start), start, blocks) for start, end in chunks], BLOCK)
        out = tuned.attend(torch.cat([query[a:b] for a, b in chunks]), kv, 0, tuned.plan(batch, kv), shape)
        return list(torch.split(out, [end - start for start, end in chunks]))

    whole = run([(0, length)])[0]
    places = [0, 1, 30, 63, 64, 127, 128, 129, 200, 255, 256, 300, 383, 511, 512, 513, 600, 699]
    for place in places:
        assert torch.equal(run([(place, place + 1)])[0][0], whole[place]), place
    for chunk, first in ((2, 500), (7, 280), (64, 0), (100, 0), (256, 0)):
        cuts = [(start, min(start + chunk, length)) for start in range(first, length, chunk)]
        assert torch.equal(torch.cat(run(cuts)), whole[first:]), chunk
    together = run([(place, place + 1) for place in places])
    assert torch.equal(torch.cat(together), whole[places])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(960, 576), (33, 72), (64, 1536), (100, 1100)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(n, k).to(dtype), torch.randn(300, k).to(dtype)
    offset = torch.randn(n).to(dtype) if bias else None
    packed = tuned.pack_linear(weight, offset)
    whole = tuned.linear(x, packed)
    wide = reference.pack_linear(weight.double(), None if offset is None else offset.double())
    assert_close(whole, reference.linear(x.double(), wide))
    for rows in (*range(1, 18), 31, 64, 129, 256):
        assert torch.equal(tuned.linear(x[:rows], packed), whole[:rows]), rows
        assert torch.equal(tuned.linear(x[9 : 9 + rows], packed), whole[9 : 9 + rows]), rows
    assert torch.equal(tuned.logits(x[:3], packed), whole[:3].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1000, 4096])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(65, width).to(dtype), torch.randn(65, width).to(dtype), torch.randn(width)
    whole = tuned.rms_norm(x, weight, 1e-6)
    assert_close(whole, reference.rms_norm(x.double(), weight.double(), 1e-6))
    for rows in (1, 2, 3, 17, 64):
        assert torch.equal(tuned.rms_norm(x[:rows], weight, 1e-6), whole[:rows])
    normed, total = tuned.add_rms_norm(x.clone(), residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, tuned.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [96, 160, 1536])
def test_activations(width: int, activation: str, dtype: torch.dtype) -> None:
    x, same = torch.randn(479, 2 * width).to(dtype), torch.eye(2 * width, dtype=torch.float64)
    whole = aten.act_mul(x, activation)
    assert_close(whole, reference.gated_linear(x.double(), reference.pack_gated(same), activation))
    for rows in (1, 2, 43, 105, 171, 204, 341, 415):
        assert torch.equal(aten.act_mul(x[:rows], activation), whole[:rows]), rows


def test_gated_linear() -> None:
    weight, x, bias = torch.randn(192, 64) / 8, torch.randn(5, 64), torch.randn(192)
    packed = tuned.pack_gated(weight, bias)
    assert torch.equal(tuned.gated_linear(x, packed, "silu"), aten.act_mul(tuned.linear(x, packed), "silu"))


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_become_the_run_dtype(name: str) -> None:
    """Without integer kernels, weights are dequantised and inputs are not rounded."""
    weight, x = quantize(torch.randn(96, 128), FORMATS[name]), torch.randn(7, 128).bfloat16()
    ops = AtenOps(CPU, torch.bfloat16)
    plain = ops.pack_linear(dequantize(weight).bfloat16())
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), ops.linear(x, plain))


def test_bfloat16_weights_are_held_in_float32_where_the_processor_would_widen_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aten, "bfloat16_is_native", lambda: False)
    weight, x = torch.randn(96, 128).bfloat16(), torch.randn(7, 128).bfloat16()
    ops = AtenOps(CPU, torch.bfloat16)
    packed = ops.pack_linear(weight)
    assert {one.dtype for one in packed.weights} == {torch.float32}
    exact = ops.linear(x.float(), ops.pack_linear(weight.float()))
    assert torch.equal(ops.linear(x, packed), exact.bfloat16())


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
def test_threads_never_cut_inside_a_vector(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows, width, kind in itertools.product((1, 5, 43, 400, 1001), (96, 128, 1000, 4864), ("silu", "gelu_tanh")):
        pieces = list(aten._slabs(rows, width, kind))
        assert sum(pieces) == rows
        for piece in pieces:
            most = (
                threads if kind == "gelu_tanh" and piece * width > aten.ONE_THREAD else -(-piece * width // aten.GRAIN)
            )
            cut = -(-piece * width // min(threads, most))
            whole_rows, whole_vectors = cut % width == 0, width % aten.VECTOR == 0 and cut % aten.VECTOR == 0
            assert whole_rows or whole_vectors or piece == 1 or piece * width <= aten.ONE_THREAD


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_rotation_and_cache_write(head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, count = 6, 2, 40
    qkv = torch.randn(count, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.rand(64, head_dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin(), torch.randint(0, 64, (count,)))
    norm = HeadNorm(weight=torch.randn(heads + kv_heads, head_dim), eps=1e-6) if normed else None
    places = torch.randperm(4 * BLOCK)[:count]
    empty = torch.zeros(4 * BLOCK, 2, kv_heads, head_dim)
    kv, wide = fill(tuned, dtype, empty), fill(reference, torch.float64, empty)
    expected = reference.rope_write(qkv.double(), rotation, norm, wide, 0, places)
    single = fill(tuned, dtype, empty)
    one = tuned.rope_write(
        qkv[7:8].clone(),
        Rotation(rotation.cos_table, rotation.sin_table, rotation.positions[7:8]),
        norm,
        single,
        0,
        places[7:8],
    )
    got = tuned.rope_write(qkv.clone(), rotation, norm, kv, 0, places)
    assert_close(got, expected)
    assert_close(kv.layers[0][:4], wide.layers[0][:4])
    assert torch.equal(one[0], got[7])
    assert torch.equal(single.lines[0][places[7]], kv.lines[0][places[7]])


@pytest.mark.parametrize("ops", [tuned, reference])
def test_embedding_and_plain_cache_write(ops: AtenOps | ReferenceOps) -> None:
    table, ids = torch.randn(50, 8).bfloat16(), torch.tensor([3, 49, 3])
    assert torch.equal(ops.embed(ids, table, None), table[ids])
    assert torch.equal(ops.embed(ids, table, 2.5), table[ids] * torch.tensor(2.5, dtype=torch.bfloat16))
    kv = fill(ops, torch.bfloat16, torch.zeros(2 * BLOCK, 2, 2, 4))
    key, value = torch.randn(3, 2, 4).bfloat16(), torch.randn(3, 2, 4).bfloat16()
    ops.write_kv(key, value, kv, 0, torch.tensor([0, 17, 31]))
    written = kv.layers[0].flatten(0, 1)[[0, 17, 31]]
    assert torch.equal(written[:, 0], key)
    assert torch.equal(written[:, 1], value)


@pytest.mark.parametrize("ops", [tuned, reference])
def test_copies_read_before_they_write(ops: AtenOps | ReferenceOps) -> None:
    kv = fill(ops, torch.float32, torch.randn(4 * BLOCK, 2, 1, 4))
    before = kv.layers[0].clone()
    ops.copy_blocks(kv, [(0, 1), (1, 2), (0, 3)])
    assert torch.equal(kv.layers[0][:4], before[[0, 0, 1, 0]])
    ops.copy_blocks(kv, [])


def test_quarantine_follows_copies() -> None:
    kv = fill(tuned, torch.float32, torch.zeros(4 * BLOCK, 2, 1, 4))
    kv.quarantined = {1, 2}
    kv.copy_blocks([(1, 3), (0, 2)])
    assert kv.quarantined == {1, 3}


def test_machines_without_kernels_of_their_own_are_served_by_torch() -> None:
    needs = Needs(dtype=torch.bfloat16, hidden_size=64, head_dims=(16,))
    ops, remarks = load_ops(CPU, "auto", needs, machine="aarch64")
    assert isinstance(ops, AtenOps)
    assert remarks == ["torch serves: kernels: native lacks vector code for aarch64, which torch's libraries have"]


@pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; the torch back end serves")
def test_named_kernels_serve_on_any_machine() -> None:
    needs = Needs(dtype=torch.bfloat16, hidden_size=64, head_dims=(16,))
    assert load_ops(CPU, "native", needs, machine="aarch64")[0].name == "native"


def test_choice_of_a_back_end() -> None:
    needs = Needs(dtype=torch.float32)
    assert isinstance(load_ops(CPU, "torch", needs)[0], AtenOps)
    assert isinstance(load_ops(CPU, "reference", needs)[0], ReferenceOps)
    with pytest.raises(BackendError, match="'fast'"):
        load_ops(CPU, "fast", needs)
