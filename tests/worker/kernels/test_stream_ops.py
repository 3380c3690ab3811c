"""Operations that families other than Llama need, on every CPU back end, against the reference in float64.

A row's bits must not depend on the batch: each row is computed again beside other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.worker.kernels.backends import ops_of
from tests.worker.kernels.closeness import assert_close

from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import ACTIVATIONS, AttentionShape, HeadNorm, Ops, Rotation
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.rows.batch import batch_of_spans

pytestmark = pytest.mark.usefixtures("inference")

CPU = torch.device("cpu")
reference = ReferenceOps(CPU)
ROWS = 37


@pytest.fixture
def backend(backend: tuple[str, torch.dtype]) -> tuple[Ops, torch.dtype]:
    return ops_of(*backend), backend[1]


def assert_rows_are_their_own(whole: torch.Tensor, of_rows: Callable[[slice], torch.Tensor]) -> None:
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20), slice(20, ROWS)):
        assert torch.equal(of_rows(rows), whole[rows]), rows


@pytest.mark.parametrize("width", [64, 1040])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norms(backend: tuple[Ops, torch.dtype], width: int, biased: bool) -> None:
    ops, dtype = backend
    x, residual = (torch.randn(2, ROWS, width) + 3).to(dtype).unbind(0)
    weight, bias = torch.randn(width), torch.randn(width) if biased else None
    wide = weight.double(), None if bias is None else bias.double()
    whole = ops.layer_norm(x, weight, bias, 1e-5).clone()
    assert_close(whole, reference.layer_norm(x.double(), *wide, 1e-5))
    assert_rows_are_their_own(whole, lambda rows: ops.layer_norm(x[rows], weight, bias, 1e-5))
    faint, odd = torch.full_like(x, 2e-39), torch.full_like(x, 1e-39)
    odd[::3] = torch.nan
    sums = ops.add_layer_norm(faint.clone(), odd.clone(), weight, bias, 1e-5)[1]
    assert torch.equal(sums.nan_to_num(7.0), (faint + odd).nan_to_num(7.0))
    normed, total = ops.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.layer_norm(total.clone(), weight, bias, 1e-5))


def test_sums(backend: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = backend
    x, y, table = (torch.randn(ROWS, 96).to(dtype) for _ in range(3))
    assert torch.equal(ops.add(x.clone(), y.clone()), x + y)
    positions = torch.randint(0, ROWS, (ROWS,))
    assert torch.equal(ops.add_positions(x.clone(), table, positions), x + table[positions])
    assert torch.equal(ops.add_positions(x.clone(), table[2:], positions % 30), x + table[positions % 30 + 2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("outputs", [96, 1000])
def test_activated_layers(backend: tuple[Ops, torch.dtype], activation: str, outputs: int) -> None:
    ops, dtype = backend
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((ROWS, 64), (outputs, 64), (outputs,)))
    weight = weight / 4
    packed = ops.pack_linear(weight, bias)
    whole = ops.activated_linear(x, packed, activation).clone()
    wide = reference.pack_linear(weight.double(), bias.double())
    assert_close(whole, reference.activated_linear(x.double(), wide, activation))
    assert_rows_are_their_own(whole, lambda rows: ops.activated_linear(x[rows], packed, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_stays_so(backend: tuple[Ops, torch.dtype], activation: str) -> None:
    """NaN in a row must survive: it is how the blocks of a failed row are recognised."""
    ops, dtype = backend
    x = torch.ones(3, 32, dtype=dtype)
    x[1, 4] = torch.nan
    found = ops.activated_linear(x, ops.pack_linear(torch.eye(32, dtype=dtype)), activation)
    assert found.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("whole", [None, False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dim", [16, 32, 48])
def test_heads_that_are_normed_together_or_do_not_turn(
    backend: tuple[Ops, torch.dtype], whole: bool | None, turned: bool, dim: int
) -> None:
    (ops, dtype), heads, kv_heads = backend, 6, 2
    qkv = torch.randn(ROWS, (heads + 2 * kv_heads) * dim).to(dtype)
    angles, positions = torch.rand(64, dim // 2) * 6, torch.randint(0, 64, (ROWS,))
    places = torch.arange(ROWS)
    norm = None if whole is None else HeadNorm(weight=torch.randn(heads + kv_heads, dim), eps=1e-6, whole=whole)

    def write(by: Ops, rows: slice, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Query heads, and the cache in the layout shared by all back ends."""
        kv = by.new_kv_cache(KVShape(num_layers=1, num_kv_heads=kv_heads, head_dim=dim, dtype=wide), 4, 16)
        rotation = Rotation(angles.cos(), angles.sin(), positions[rows]) if turned else None
        query = by.rope_write(qkv[rows].to(wide, copy=True), rotation, norm, kv, 0, places[rows])
        return query.clone(), by.export_blocks(kv, [0, 1, 2, 3]).cells

    everything = slice(0, ROWS)
    (query, cells), expected = write(ops, everything, dtype), write(reference, everything, torch.float64)
    assert_close(query, expected[0])
    assert_close(cells, expected[1])
    assert_rows_are_their_own(query, lambda rows: write(ops, rows, dtype)[0])


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_queries_that_do_not_turn_are_read_where_they_are(backend: tuple[Ops, torch.dtype], kv_heads: int) -> None:
    (ops, dtype), heads, dim = backend, 6, 32
    qkv = torch.randn(ROWS, (heads + 2 * kv_heads) * dim).to(dtype)
    kv = ops.new_kv_cache(KVShape(num_layers=1, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype), 3, 16)
    query = ops.rope_write(qkv, None, None, kv, 0, torch.arange(ROWS))
    assert torch.equal(query.flatten(1), qkv[:, : heads * dim])
    plan = ops.plan(batch_of_spans([(0, ROWS)], torch.arange(3, dtype=torch.int32)[None]), kv)
    shape = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    apart = query.clone(memory_format=torch.contiguous_format)
    assert torch.equal(ops.attend(query, kv, 0, plan, shape), ops.attend(apart, kv, 0, plan, shape))
