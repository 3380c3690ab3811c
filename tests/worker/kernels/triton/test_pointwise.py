"""Norms, activations, embedding, rotation and cache writes against the reference, and row by row."""

from __future__ import annotations

import pytest
import torch
from tests.worker.kernels.closeness import assert_close
from tests.worker.kernels.triton.support import DEVICE, DTYPES, reference
from tests.worker.kernels.triton.support import walking as ops
from triton.errors import TritonError

from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import ACTIVATIONS, CLAMPED, BackendError, HeadNorm, Rotation
from pagoda_worker.kernels.reference import gated
from pagoda_worker.kernels.triton.pointwise import act_mul

BLOCK = 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1000, 4096])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(9, width).to(dtype).to(DEVICE), torch.randn(9, width).to(dtype).to(DEVICE)
    weight = torch.randn(width).to(DEVICE)
    whole = ops.rms_norm(x, weight, 1e-6)
    assert_close(whole, reference.rms_norm(x.cpu().double(), weight.cpu().double(), 1e-6))
    assert torch.equal(ops.rms_norm(x[4:7], weight, 1e-6), whole[4:7])
    normed, total = ops.add_rms_norm(x.clone(), residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference.rms_norm(total.cpu().double(), weight.cpu().double(), 1e-6))
    one, _ = ops.add_rms_norm(x[5:6].clone(), residual[5:6], weight, 1e-6)
    assert torch.equal(one[0], normed[5])
    assert ops.rms_norm(x[:0], weight, 1e-6).shape == (0, width)


def test_a_weight_may_have_a_line_per_head() -> None:
    x, weight = torch.randn(3, 4, 32), torch.randn(4, 32)
    assert_close(
        ops.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, CLAMPED])
@pytest.mark.parametrize("width", [96, 1536])
def test_activations(width: int, activation: str, dtype: torch.dtype) -> None:
    x = (torch.randn(7, 2 * width) * 3).to(dtype).to(DEVICE)
    x[0, 0], x[0, 1], x[1, width], x[2, width] = 60.0, -60.0, 60.0, -60.0
    whole = act_mul(x, activation)
    assert_close(whole, gated(x.cpu().double(), activation))
    assert torch.equal(act_mul(x[3:5], activation), whole[3:5])
    assert act_mul(x[:0], activation).shape == (0, width)
    x[4, 0], x[5, width] = torch.nan, torch.nan
    assert act_mul(x, activation).isnan().nonzero().tolist() == [[4, 0], [5, 0]]


def test_an_activation_that_is_not_known_is_no_other() -> None:
    with pytest.raises(TritonError):
        act_mul(torch.ones(2, 8, device=DEVICE), "sigmoid")


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_is_the_reference_bit_for_bit(dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 1100).to(dtype), torch.tensor([3, 49, 3])
    for scale in (None, 2.55):
        got = ops.embed(ids.to(DEVICE), table.to(DEVICE), scale)
        assert torch.equal(got.cpu(), reference.embed(ids, table, scale))
    assert ops.embed(ids[:0].to(DEVICE), table.to(DEVICE), None).shape == (0, 1100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_rotation_and_cache_write(head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, count = 7, 2, 12
    qkv = torch.randn(count, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.rand(64, head_dim // 2) * 6
    positions, places = torch.randint(0, 64, (count,)), torch.randperm(4 * BLOCK)[:count]
    norm = HeadNorm(weight=torch.randn(heads + kv_heads, head_dim), eps=1e-6) if normed else None
    on_device = None if norm is None else HeadNorm(weight=norm.weight.to(DEVICE), eps=norm.eps)
    shape = KVShape(num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    kv, single = ops.new_kv_cache(shape, 4, BLOCK), ops.new_kv_cache(shape, 4, BLOCK)
    wide = reference.new_kv_cache(
        KVShape(num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float64), 4, BLOCK
    )
    expected = reference.rope_write(
        qkv.double(), Rotation(angles.cos(), angles.sin(), positions), norm, wide, 1, places
    )
    cos, sin, there = angles.cos().to(DEVICE), angles.sin().to(DEVICE), places.to(DEVICE)
    turned = Rotation(cos, sin, positions.to(DEVICE))
    got = ops.rope_write(qkv.to(DEVICE, copy=True), turned, on_device, kv, 1, there)
    assert_close(got, expected)
    assert_close(kv.storage[1].permute(1, 3, 0, 2, 4), wide.layers[1][:4])
    assert not kv.storage[0].any()
    alone = Rotation(cos, sin, turned.positions[7:8])
    one = ops.rope_write(qkv[7:8].to(DEVICE, copy=True), alone, on_device, single, 1, there[7:8])
    assert torch.equal(one[0], got[7])
    block, offset = int(places[7]) // BLOCK, int(places[7]) % BLOCK
    assert torch.equal(single.storage[1, :, block, :, offset], kv.storage[1, :, block, :, offset])


def test_plain_cache_write_and_copies() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    kv = ops.new_kv_cache(shape, 4, BLOCK)
    key, value = torch.randn(3, 2, 64, device=DEVICE), torch.randn(3, 2, 64, device=DEVICE)
    ops.write_kv(key, value, kv, 1, torch.tensor([0, 17, 31], device=DEVICE))
    keys, values = kv.layer(1)
    for i, (block, offset) in enumerate([(0, 0), (1, 1), (1, 15)]):
        assert torch.equal(keys[block, :, offset], key[i].bfloat16())
        assert torch.equal(values[block, :, offset], value[i].bfloat16())
    assert not kv.storage[0].any()
    kv.storage.copy_(torch.randn(kv.storage.shape))
    before = kv.storage.clone()
    ops.copy_blocks(kv, [(0, 1), (1, 2), (0, 3)])  # every source is read before any destination is written
    assert torch.equal(kv.storage, before[:, :, [0, 0, 1, 0]])
    ops.copy_blocks(kv, [])
    assert torch.equal(kv.storage, before[:, :, [0, 0, 1, 0]])


def test_a_block_size_it_cannot_tile_is_refused() -> None:
    with pytest.raises(BackendError, match="block_size"):
        ops.new_kv_cache(KVShape(num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.float32), 1, 24)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_logits(bias: bool) -> None:
    weight, x = torch.randn(33, 72).to(DEVICE), torch.randn(5, 72).to(DEVICE)
    offset = torch.randn(33).to(DEVICE) if bias else None
    packed = ops.pack_linear(weight, offset)
    expected = torch.nn.functional.linear(x, weight, offset)
    assert torch.equal(ops.linear(x, packed), expected)
    half = ops.pack_linear(weight.bfloat16(), None)
    assert torch.equal(ops.logits(x.bfloat16(), half), ops.linear(x.bfloat16(), half))


def test_layers_of_heads() -> None:
    weight, x = torch.randn(3, 20, 16), torch.randn(5, 48)
    got = ops.head_linear(x.to(DEVICE), ops.pack_heads(weight.to(DEVICE)))
    assert_close(got, reference.head_linear(x.double(), reference.pack_heads(weight.double())))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norms(biased: bool, dtype: torch.dtype) -> None:
    x, residual = ((torch.randn(7, 100) + 2).to(dtype).to(DEVICE) for _ in range(2))
    weight, bias = torch.randn(100), torch.randn(100) if biased else None
    wide = weight.double(), None if bias is None else bias.double()
    on_device = weight.to(DEVICE), None if bias is None else bias.to(DEVICE)
    whole = ops.layer_norm(x, *on_device, 1e-5)
    assert_close(whole, reference.layer_norm(x.cpu().double(), *wide, 1e-5))
    assert torch.equal(ops.layer_norm(x[4:6], *on_device, 1e-5), whole[4:6])
    normed, total = ops.add_layer_norm(x.clone(), residual, *on_device, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.layer_norm(total, *on_device, 1e-5))
