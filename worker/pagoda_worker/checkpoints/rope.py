"""Rotary position embedding: which angle each pair of dimensions turns by, per position.

Su et al., RoFormer (arXiv 2104.09864), in the half-split form of the published checkpoints: dimension i turns with
dimension i + D/2. `linear` divides positions (arXiv 2306.15595); `llama3` divides low frequencies only and blends the
middle ones, as in the Llama 3.1 release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pagoda_worker.kernels.ops import Rotation


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """theta, head size, and the scaling of frequencies: kind "default", "linear" or "llama3"."""

    theta: float
    head_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(shape: RopeShape) -> torch.Tensor:
    """[D / 2] float32 angles per position."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    plain = 1.0 / (shape.theta**exponents)
    if shape.kind == "default":
        return plain
    if shape.kind == "linear":
        return plain / shape.factor
    wavelength = 2 * math.pi / plain
    blend = (shape.original_max_position / wavelength - shape.low_freq_factor) / (
        shape.high_freq_factor - shape.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / shape.factor + blend * plain


class RotaryTable:
    """Cosines and sines of all positions, [max_positions, D / 2] float32 each.

    A table, not a formula per step: the bits of a cosine must not depend on how many of them are computed at once.
    """

    def __init__(self, shape: RopeShape, max_positions: int, device: torch.device) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse_frequencies(shape)
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """positions [T] int64."""
        return Rotation(self._cos, self._sin, positions)
