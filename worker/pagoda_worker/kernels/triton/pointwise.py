"""Work between the matrix products. A program computes one row (or a fixed-size piece of one), whatever the batch.

All arithmetic is float32, rounded once to the dtype of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagoda_worker.kernels.ops import CLAMP, CLAMPED_GAIN, HeadNorm, Rotation

PIECE = 1024  # elements of a row that one program of an elementwise kernel computes
HEADS_PER_PROGRAM = 8

_CLAMP: tl.constexpr = tl.constexpr(CLAMP)
_CLAMPED_GAIN: tl.constexpr = tl.constexpr(CLAMPED_GAIN)


@triton.jit
def norm_kernel(
    out, total_out, x, residual, weight, bias, eps, width, weight_rows,
    ADD: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = norm(x) * weight + bias of one row; with ADD, of x + residual, which is stored to total_out."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < width
    value = tl.load(x + row * width + at, mask=here, other=0.0)
    if ADD:
        added = value.to(tl.float32) + tl.load(residual + row * width + at, mask=here, other=0.0).to(tl.float32)
        value = added.to(total_out.dtype.element_ty)
        tl.store(total_out + row * width + at, value, mask=here)
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(here, wide - tl.sum(wide, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + (row % weight_rows) * width + at, mask=here, other=0.0)
    normed = wide * scale * factor
    if BIAS:
        normed += tl.load(bias + at, mask=here, other=0.0)
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), mask=here)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up, all float32; see Ops.gated_linear."""
    if ACTIVATION == "gelu":
        acted = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu":
        acted = tl.where(gate < 0.0, 0.0, gate)  # propagates NaN
    else:
        tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "clamped")
        inner = gate
        if ACTIVATION == "gelu_tanh":  # x / 2 * (1 + tanh(y)) is x * sigmoid(2 y)
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        if ACTIVATION == "clamped":  # with comparisons that propagate NaN
            gate = tl.where(gate > _CLAMP, _CLAMP, gate)
            up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up)) + 1.0
            inner = _CLAMPED_GAIN * gate
        acted = gate / (1.0 + tl.exp(-inner))
    return acted * up


@triton.jit
def act_mul_kernel(out, gate_up, width, stride, ACTIVATION: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    here = at < width
    gate = tl.load(gate_up + row * stride + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=here)


@triton.jit
def embed_kernel(out, ids, table, width, scale, SCALED: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    here = at < width
    value = tl.load(table + tl.load(ids + row) * width + at, mask=here, other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out + row * width + at, value, mask=here)


@triton.jit
def rope_write_kernel(
    qkv, cos_table, sin_table, positions, weight, keys, values, kv_indices, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PLANES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one token: rotate query heads in place, and cache keys and, with two planes, values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    half: tl.constexpr = D // 2
    at = tl.arange(0, HALF)[None, :]
    inside = (head < HEADS + PLANES * KV_HEADS) & (at < half)
    turning = head < HEADS + KV_HEADS
    source = qkv + (token * (HEADS + PLANES * KV_HEADS) + head) * D + at
    first, second = tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        factor = weight + head * D + at
        x = x * scale * tl.load(factor, mask=inside & turning, other=0.0)
        y = y * scale * tl.load(factor + half, mask=inside & turning, other=0.0)
    if TURN:
        angle = tl.load(positions + token) * half + at
        cos = tl.load(cos_table + angle, mask=at < half, other=0.0)
        sin = tl.load(sin_table + angle, mask=at < half, other=0.0)
        x, y = x * cos - y * sin, y * cos + x * sin
    turned, turned_second = x.to(first.dtype), y.to(first.dtype)
    is_query = inside & (head < HEADS)
    tl.store(source, turned, mask=is_query)
    tl.store(source + half, turned_second, mask=is_query)
    index = tl.load(kv_indices + token)
    block = index // BLOCK_SIZE
    kv_head = tl.where(turning, head - HEADS, head - HEADS - KV_HEADS)
    place = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + index % BLOCK_SIZE) * D + at
    is_key = inside & turning & (head >= HEADS)
    tl.store(keys + place, turned, mask=is_key)
    tl.store(keys + place + half, turned_second, mask=is_key)
    if PLANES == 2:
        is_value = inside & (head >= HEADS + KV_HEADS)
        tl.store(values + place, first, mask=is_value)
        tl.store(values + place + half, second, mask=is_value)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight float32 [H] or the last dimensions of x; see Ops.rms_norm."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _norm(out, out, x, x, (weight, None, eps), add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See Ops.add_rms_norm; the sum is stored in x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _norm(out, x, x, residual.contiguous(), (weight, None, eps), add=True)
    return out, x


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See Ops.layer_norm."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _norm(out, out, x, x, (weight, bias, eps), add=False, centred=True)
    return out


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See Ops.add_layer_norm; the sum is stored in x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _norm(out, x, x, residual.contiguous(), (weight, bias, eps), add=True, centred=True)
    return out, x


def _norm(
    out: torch.Tensor,
    total: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor | None, float],
    *,
    add: bool,
    centred: bool = False,
) -> None:
    (weight, bias, eps), width = norm, x.shape[-1]
    block = triton.next_power_of_2(width)
    rows, weight_rows = x.numel() // width, weight.numel() // width
    weight = weight.contiguous()
    if rows:
        norm_kernel[(rows,)](
            out, total, x, residual, weight, weight if bias is None else bias, eps, width, weight_rows, ADD=add,
            CENTRED=centred, BIAS=bias is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [T, 2 I] -> act(gate) * up [T, I]; see Ops.gated_linear."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if rows:
        grid = (rows, triton.cdiv(width, PIECE))
        act_mul_kernel[grid](out, gate_up, width, 2 * width, ACTIVATION=activation, PIECE=PIECE)
    return out


def embed(token_ids: torch.Tensor, table: torch.Tensor, scale: float | None) -> torch.Tensor:
    """See Ops.embed."""
    rows, width = token_ids.shape[0], table.shape[1]
    out = table.new_empty((rows, width))
    factor = 1.0 if scale is None else scale
    if rows:
        grid = (rows, triton.cdiv(width, PIECE))
        embed_kernel[grid](out, token_ids, table, width, factor, SCALED=scale is not None, PIECE=PIECE)
    return out


def rope_write(
    qkv: torch.Tensor,
    rotation: Rotation | None,
    norm: HeadNorm | None,
    cache: torch.Tensor,
    kv_indices: torch.Tensor,
) -> torch.Tensor:
    """See Ops.rope_write; cache [P, num_blocks, Hkv, block_size, D]. Returns a view of `qkv`."""
    planes, _, kv_heads, block_size, dim = cache.shape
    qkv = qkv.contiguous()
    tokens, all_heads = qkv.shape[0], qkv.shape[1] // dim
    heads = all_heads - planes * kv_heads
    if norm is not None and norm.whole:
        turning = qkv.view(tokens, all_heads, dim)[:, : heads + kv_heads]
        turning.copy_(norm.of(turning, kv_heads, rms_norm))
        norm = None
    weight = cache if norm is None else norm.weight.contiguous()
    tables = (kv_indices,) * 3 if rotation is None else (rotation.cos_table, rotation.sin_table, rotation.positions)
    if tokens:
        rope_write_kernel[(tokens, triton.cdiv(all_heads, HEADS_PER_PROGRAM))](
            qkv, *tables, weight, cache[0], cache[-1], kv_indices, 0.0 if norm is None else norm.eps, HEADS=heads,
            KV_HEADS=kv_heads, PLANES=planes, D=dim, HALF=triton.next_power_of_2(dim // 2), BLOCK_SIZE=block_size,
            NORM=norm is not None, TURN=rotation is not None, GROUP=HEADS_PER_PROGRAM,
        )  # fmt: skip
    return qkv.view(tokens, all_heads, dim)[:, :heads]
