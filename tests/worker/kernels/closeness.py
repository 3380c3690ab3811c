"""How close a back end must come to the reference, which computes in float64."""

from __future__ import annotations

import torch

# Largest difference, relative to the largest value: from rounding the result, and for 16-bit types the softmax weights.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 5e-6}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    error = (got.cpu().double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-3)
    assert error < TOLERANCE[got.dtype], f"off by {float(error):.2g}"
