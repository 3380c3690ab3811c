"""Before a worker serves: do the kernels compute here what they should? A few milliseconds on one odd shape each.

A processor, compiler or library that breaks them would otherwise show as slightly wrong answers. The yardstick is the
reference back end in float64; invariance is checked bit by bit.
"""

from __future__ import annotations

import torch

from pagoda_worker.batch import Batch
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import AttentionShape, Ops, Rotation
from pagoda_worker.kernels.reference import ReferenceOps

ROWS, HIDDEN, OUT, BLOCK = 13, 96, 80, 16
HEADS, KV_HEADS, DIM = 6, 2, 32
TOLERANCE = 0.03  # bfloat16 results of magnitude about 1


def problems(ops: NativeOps) -> dict[str, str]:
    """What is wrong with these kernels on this machine, by the family of operations it is wrong with."""
    checks = {"linear": _linear_problem, "pointwise": _pointwise_problem, "attention": _attention_problem}
    with torch.inference_mode():
        found = {family: check(ops, torch.Generator().manual_seed(1)) for family, check in checks.items()}
    return {family: problem for family, problem in found.items() if problem}


def _linear_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    weight = (torch.randn(OUT, HIDDEN, generator=generator) * HIDDEN**-0.5).bfloat16()
    bias = torch.randn(OUT, generator=generator).bfloat16()
    packed = ops.pack_linear(weight, bias)
    y = ops.linear(x, packed)
    if _differs(y, torch.nn.functional.linear(x.double(), weight.double(), bias.double())):
        return "linear layers are wrong"
    if not torch.equal(torch.cat([ops.linear(row[None], packed) for row in x]), y):
        return "a row of a linear layer depends on its neighbours"
    return None


def _pointwise_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    norm = torch.linspace(0.5, 1.5, HIDDEN)
    if _differs(ops.rms_norm(x, norm, 1e-5), ReferenceOps(ops.device).rms_norm(x.double(), norm, 1e-5)):
        return "norms are wrong"
    return None


def _attention_problem(ops: NativeOps, generator: torch.Generator) -> str | None:
    length = 2 * BLOCK + 5
    qkv = torch.randn(length, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).bfloat16()
    together = _attend(ops, qkv, [length])
    if _differs(together, _attend(ReferenceOps(ops.device), qkv.double(), [length])):
        return "attention is wrong"
    if not torch.equal(_attend(ops, qkv, [BLOCK + 3] + [1] * (length - BLOCK - 3)), together):
        return "attention depends on how a prompt is cut"
    return None


def _attend(ops: Ops, qkv: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """One row, computed in chunks of these sizes, through rotation, cache and attention."""
    shape = KVShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=qkv.dtype)
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
