"""Before a worker serves: do the kernels compute here what they should? A few milliseconds on one odd shape each.

A processor, compiler or library that breaks them would otherwise show as slightly wrong answers. The yardstick is the
reference back end in float64; invariance is checked bit by bit.
"""

from __future__ import annotations

import torch

from pagoda_worker.batch import Batch
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.kv_cache import KVShape, quantize
from pagoda_worker.kernels.ops import AttentionShape, Ops, Rotation
from pagoda_worker.kernels.reference import ReferenceOps

ROWS, HIDDEN, OUT, BLOCK = 13, 96, 80, 16
HEADS, KV_HEADS, DIM = 6, 2, 32
TOLERANCE = 0.03  # bfloat16 results of magnitude about 1


def problem(ops: NativeOps) -> str | None:
    """What is wrong with these kernels on this machine, or None."""
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
        weight = (torch.randn(OUT, HIDDEN, generator=generator) * HIDDEN**-0.5).bfloat16()
        bias = torch.randn(OUT, generator=generator).bfloat16()
        return (
            _linear_problem(ops, x, weight, bias)
            or _attention_problem(ops, generator, quantized=False)
            or _attention_problem(ops, generator, quantized=True)
            or _blocks_problem(ops, generator)
        )


def _linear_problem(ops: NativeOps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    packed = ops.pack_linear(weight, bias)
    y = ops.linear(x, packed)
    if _differs(y, torch.nn.functional.linear(x.double(), weight.double(), bias.double())):
        return "linear layers are wrong"
    if not torch.equal(torch.cat([ops.linear(row[None], packed) for row in x]), y):
        return "a row of a linear layer depends on its neighbours"
    norm = torch.linspace(0.5, 1.5, HIDDEN)
    if _differs(ops.rms_norm(x, norm, 1e-5), ReferenceOps(ops.device).rms_norm(x.double(), norm, 1e-5)):
        return "norms are wrong"
    return None


def _attention_problem(ops: NativeOps, generator: torch.Generator, quantized: bool) -> str | None:
    length, over = 2 * BLOCK + 5, " over int8" if quantized else ""
    qkv = torch.randn(length, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).bfloat16()
    together = _attend(ops, qkv, [length], quantized)
    if _differs(together, _attend(ReferenceOps(ops.device), qkv.double(), [length], quantized)):
        return f"attention{over} is wrong"
    if not torch.equal(_attend(ops, qkv, [BLOCK + 3] + [1] * (length - BLOCK - 3), quantized), together):
        return f"attention{over} depends on how a prompt is cut"
    return None


def _blocks_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    shape = KVShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16, quantized=True)
    kv = ops.new_kv_cache(shape, 3, BLOCK)
    key, value = torch.randn(2, 3 * BLOCK, KV_HEADS, DIM, generator=generator).bfloat16().unbind(0)
    ops.write_kv(key, value, kv, 0, torch.arange(3 * BLOCK))
    ops.copy_blocks(kv, [(0, 1), (1, 2)])
    after = ops.export_blocks(kv, [0, 1, 2])
    blocks = torch.stack((key, value), 1).view(3, BLOCK, 2, KV_HEADS, DIM).moveaxis(1, 3)[:, :, None]
    cells, scales = quantize(blocks[[0, 0, 1]])
    if after.scales is None or not torch.equal(after.cells, cells) or not torch.equal(after.scales, scales):
        return "keys and values in int8 are rounded or copied wrongly"
    return None


def _attend(ops: Ops, qkv: torch.Tensor, chunks: list[int], quantized: bool) -> torch.Tensor:
    """One row, computed in chunks of these sizes, through rotation, cache and attention."""
    shape = KVShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=qkv.dtype, quantized=quantized)
    attention = AttentionShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
    angles = torch.linspace(0, 6, len(qkv))[:, None] * torch.linspace(1, 0.1, DIM // 2)
    kv = ops.new_kv_cache(shape, 4, BLOCK)
    outputs, start = [], 0
    for size in chunks:
        positions = torch.arange(start, start + size)
        batch = Batch(
            token_ids=positions,
            positions=positions,
            kv_indices=positions,
            block_tables=torch.arange(3, dtype=torch.int32)[None],
            query_starts=[0, size],
            query_lens=[size],
            context_lens=[start + size],
            logit_indices=positions[-1:] - start,
        )
        part = qkv[start : start + size].clone()
        query = ops.rope_write(part, Rotation(angles.cos(), angles.sin(), positions), None, kv, 0, positions)
        outputs.append(ops.attend(query, kv, 0, ops.plan(batch, kv), attention).clone())
        start += size
    return torch.cat(outputs)


def _differs(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return not torch.allclose(got.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE)
