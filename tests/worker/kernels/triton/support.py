"""What the tests of the Triton kernels share: where they run, and how close to float64 they must come."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.worker.models.harness import make_batch

from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.kernels.triton.ops import TritonOps, interpreted
from pagoda_worker.kernels.triton.plan import Tiles
from pagoda_worker.rows.batch import Batch

CPU = torch.device("cpu")
DEVICE = torch.device("cpu" if interpreted() else "cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# As for the other back ends: see tests/worker/kernels/test_ops.py.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 5e-6}

reference = ReferenceOps(CPU)
walking = TritonOps(DEVICE, Tiles(low=16, high=64, fill=0))
splitting = TritonOps(DEVICE, Tiles(low=16, high=64, fill=10**6))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    error = (got.cpu().double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-3)
    assert error < TOLERANCE[got.dtype], f"off by {float(error):.2g}"


def batch_of(rows: list[tuple[int, int, list[int]]], block_size: int) -> Batch:
    """Rows of (new tokens, context length, block ids)."""
    return make_batch([([0] * new, context - new, blocks) for new, context, blocks in rows], block_size)


def moved(batch: Batch) -> Batch:
    names = ("token_ids", "positions", "kv_indices", "block_tables", "logit_indices")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


def shape_of(heads: int, kv_heads: int, head_dim: int, **changes: float | None) -> AttentionShape:
    scale = head_dim**-0.5
    return AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=scale, **changes)  # type: ignore[arg-type]
