"""Rotary position embedding: the angle by which each pair of dimensions rotates, per position.

Su et al., RoFormer (arXiv 2104.09864). Kernels rotate dimension i with dimension i + D/2; if a checkpoint pairs other
dimensions, loading puts the rows of its query and key matrices in that order (`head_order`), which changes no product
of a query with a key. Dimensions that do not rotate are pairs whose angle is 0.

`linear` divides positions (arXiv 2306.15595); `llama3` divides low frequencies only and blends the middle ones, as in
the Llama 3.1 release; `yarn` does so by the number of turns within the trained length and scales the result (arXiv
2309.00071); `longrope` divides each frequency by a factor of its own, with one list for rows within the trained length
and one beyond it (arXiv 2402.13753); `dynamic` raises theta with the length of a row.

The last two make a token depend on the length of its row. Here they are fixed at the longest row allowed (`fixed_at`),
because cached keys are rotated only once, and because a row must not depend on when it is computed. transformers
decides anew in every step by the longest row of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pagoda_worker.kernels.ops import Rotation

SLICE = 8192  # positions computed at a time


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """theta, head size, which dimensions are pairs, and the scaling of frequencies.

    Attributes:
        turning: How many dimensions of a head, from the first, rotate; 0: all.
        interleaved: Dimension 2 i is stored beside the one it rotates with; else they are half of `turning` apart.
        magnitude: Factor of the rotated values, the one thing besides the angles that a scaling may change.
    """

    theta: float
    head_dim: int
    turning: int = 0
    interleaved: bool = False
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    magnitude: float = 1.0

    @property
    def dims(self) -> int:
        return self.turning or self.head_dim

    @property
    def bytes_per_position(self) -> int:
        """Of its table."""
        return 2 * (self.head_dim // 2) * torch.float32.itemsize

    @property
    def reach(self) -> int:
        """The longest row its scaling is made for, where that may exceed the model's positions; else 0."""
        return int(self.original_max_position * self.factor) if self.kind in ("dynamic", "yarn") else 0

    def fixed_at(self, length: int) -> str:
        """The part of the angles that depends on `length`, the longest row allowed; empty if none does."""
        beyond = length > self.original_max_position
        if self.kind == "longrope" and beyond:
            return "long factors"
        return f"theta of {length} tokens" if self.kind == "dynamic" and beyond else ""


def head_order(shape: RopeShape) -> list[int] | None:
    """Which stored dimension of a head is at each place of ours; None if they are the same."""
    dims, half = shape.dims, shape.dims // 2
    left = list(range(dims, shape.head_dim))
    first = list(range(0, dims, 2)) if shape.interleaved else list(range(half))
    second = list(range(1, dims, 2)) if shape.interleaved else list(range(half, dims))
    order = first + left[: len(left) // 2] + second + left[len(left) // 2 :]
    return None if order == sorted(order) else order


def inverse_frequencies(shape: RopeShape, length: int = 0) -> torch.Tensor:
    """[`dims` / 2] float32 angles per position; `length`: see `RopeShape.fixed_at`."""
    theta = _theta_of(shape, length) if shape.kind == "dynamic" else shape.theta
    plain = _plain(theta, shape.dims)
    if shape.kind == "linear":
        return plain / shape.factor
    if shape.kind == "llama3":
        return _blended(shape, plain)
    if shape.kind == "yarn":
        return _interpolated(shape, plain)
    if shape.kind == "longrope":
        factors = shape.long_factor if length > shape.original_max_position else shape.short_factor
        return plain / torch.tensor(factors, dtype=torch.float32)
    return plain


def _plain(theta: float, dims: int) -> torch.Tensor:
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    return 1.0 / (theta**exponents)


def _theta_of(shape: RopeShape, length: int) -> float:
    longer = max(length, shape.original_max_position) / shape.original_max_position
    stretched: float = shape.factor * longer - (shape.factor - 1)
    return float(shape.theta * stretched ** (shape.dims / (shape.dims - 2)))


def _blended(shape: RopeShape, plain: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    blend = (shape.original_max_position / wavelength - shape.low_freq_factor) / (
        shape.high_freq_factor - shape.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / shape.factor + blend * plain


def _interpolated(shape: RopeShape, plain: torch.Tensor) -> torch.Tensor:
    """Pairs that turn more than `beta_fast` times within the trained length stay, those below `beta_slow` slow down."""

    def pair_of(turns: float) -> float:
        length = shape.original_max_position / (turns * 2 * math.pi)
        return shape.dims * math.log(length) / (2 * math.log(shape.theta))

    low, high = pair_of(shape.beta_fast), pair_of(shape.beta_slow)
    if shape.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.dims - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(shape.dims // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / shape.factor * slowed + plain * (1 - slowed)


class RotaryTable:
    """Cosines and sines of all positions, [copies * max_positions, D / 2] float32 each: the same again in every copy.

    A table instead of a per-step formula: the bits of a cosine must not depend on how many are computed at once.
    """

    def __init__(self, shape: RopeShape, max_positions: int, device: torch.device, copies: int = 1) -> None:
        size, turning = (max_positions, shape.head_dim // 2), shape.dims // 2
        self._cos, self._sin = torch.ones(size, device=device), torch.zeros(size, device=device)
        frequencies, start = inverse_frequencies(shape, max_positions), 0
        for positions in torch.split(torch.arange(max_positions, dtype=torch.float32), SLICE):
            angles, rows = positions[:, None] * frequencies, slice(start, start := start + len(positions))
            for table, values in ((self._cos, angles.cos()), (self._sin, angles.sin())):
                table[rows, :turning] = values if shape.magnitude == 1.0 else values * shape.magnitude
        if copies > 1:
            self._cos, self._sin = self._cos.repeat(copies, 1), self._sin.repeat(copies, 1)

    def at(self, positions: torch.Tensor) -> Rotation:
        """positions [T] int64."""
        return Rotation(self._cos, self._sin, positions)
