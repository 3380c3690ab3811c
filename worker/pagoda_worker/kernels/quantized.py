"""Weights as small whole numbers: what every format, ours or a checkpoint's, comes down to.

    w[n, k] = (levels[n, k] - zeros[n, g]) * scales[n, g]        g = k // group

The scales of 4 bits are float16 numbers: a back end may keep them as such, and rounds what is not. Levels of 4 bits may
also be `floats`: then each stands for a number of E2M1, whose scales are powers of two and which has no zeros.

With `activation_bits` 8 the layer's input is rounded too, each token's by itself and as it arrives:

    a[t, k] = round(x[t, k] * (127 / m[t, g]))        s[t, g] = m[t, g] * (1 / 127)        m[t, g] = max |x[t, group g]|

in float32, one rounding per operation, halves to even, so that every back end has the same whole numbers; a is 0 where
m is below FAINT. The layer is then

    y[t, n] = sum over g of s[t, g] * scales[n, g] * sum over k of (levels[n, k] - zeros[n, g]) * a[t, k]

whose inner sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

MAX_ACTIVATION = 127
FAINT = 2.0**-100
FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1, by its bits
FAINTEST_SCALE = torch.finfo(torch.float16).tiny


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix is stored. `group`: inputs that share a scale; 0 is all of them, in segments all of one."""

    bits: int
    group: int
    activation_bits: int
    floats: bool = False


FORMATS = {
    "int8": Format(bits=8, group=0, activation_bits=8),
    "int4": Format(bits=4, group=64, activation_bits=8),
    "int4a16": Format(bits=4, group=64, activation_bits=16),
}


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A matrix [N, K] in levels 0 .. 2**bits - 1. `zeros` None: the middle level, 2**(bits - 1), everywhere."""

    levels: torch.Tensor  # [N, K] uint8
    scales: torch.Tensor  # [N, K / group] float32
    zeros: torch.Tensor | None  # [N, K / group] uint8
    bits: int
    activation_bits: int
    floats: bool = False

    @property
    def shape(self) -> torch.Size:
        """[N, K]"""
        return self.levels.shape

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]


Weight = torch.Tensor | QuantizedWeight


def by_rows(weight: Weight, move: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """The weight whose rows are where `move` puts those of a tensor [N, ..]."""
    if isinstance(weight, torch.Tensor):
        return move(weight)
    zeros = None if weight.zeros is None else move(weight.zeros)
    return replace(weight, levels=move(weight.levels), scales=move(weight.scales), zeros=zeros)


def quantize(weight: torch.Tensor, form: Format) -> QuantizedWeight:
    """weight [N, K] -> its nearest levels, the middle one being zero. K must be a multiple of the group.

    With 8 bits, a scale maps the largest magnitude of its group to the last level above the middle. With 4 bits that
    would waste one level of sixteen: there the extreme, whatever its sign, becomes level 0, the one farthest from the
    middle, and scales may be negative. A weight almost as large with the other sign is off by up to one level; the mean
    square error of Gaussian weights is less by a fifth all the same.
    """
    group = form.group or weight.shape[1]
    middle = 1 << form.bits - 1
    grouped = weight.float().reshape(len(weight), -1, group)
    of_four = form.bits == 4
    scales = (_extremes(grouped) / -middle).half().float() if of_four else grouped.abs().amax(-1) / (middle - 1)
    scales = torch.where(scales.abs() < FAINTEST_SCALE, FAINTEST_SCALE, scales)
    levels = (grouped / scales.unsqueeze(-1)).round_().clamp_(-middle, middle - 1).add_(middle)
    return QuantizedWeight(
        levels=levels.to(torch.uint8).flatten(1),
        scales=scales,
        zeros=None,
        bits=form.bits,
        activation_bits=form.activation_bits,
    )


def _extremes(grouped: torch.Tensor) -> torch.Tensor:
    """Of each group [.., G] the value of the largest magnitude, the first of several."""
    most, least = grouped.amax(-1), grouped.amin(-1)
    extremes = torch.where(most > -least, most, least)
    tied = most == -least  # few: only these are asked for an order, which takes several times as long
    groups = grouped[tied]
    extremes[tied] = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    return extremes


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """[N, K] float32"""
    if weight.floats:
        known = torch.tensor(FLOATS, device=weight.levels.device)
        grouped = known[weight.levels.long()].view(len(weight.levels), -1, weight.group)
        return (grouped * weight.scales.unsqueeze(-1)).flatten(1)
    zeros = 1 << weight.bits - 1 if weight.zeros is None else weight.zeros.float().unsqueeze(-1)
    grouped = weight.levels.reshape(len(weight.levels), -1, weight.group).float()
    return ((grouped - zeros) * weight.scales.unsqueeze(-1)).flatten(1)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 -> 2**(exponent - 127) float32; 0 is nothing, and 255 infinity."""
    return (exponents.int() << 23).view(torch.float32)


def exponents(powers: torch.Tensor) -> torch.Tensor:
    """What `powers` made those of, as uint8."""
    return (powers.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def round_activations(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [T, K] as the layer sees it with `activation_bits` 8: scale * whole number, float32."""
    grouped = x.float().reshape(len(x), -1, group)
    most = grouped.abs().amax(-1, keepdim=True)
    # Not `127 / most`, which torch computes as 127 * (1 / most).
    inverse = torch.where(most >= FAINT, torch.full_like(most, MAX_ACTIVATION) / most, 0)
    return ((grouped * inverse).round_() * (most * (1 / MAX_ACTIVATION))).flatten(1)
