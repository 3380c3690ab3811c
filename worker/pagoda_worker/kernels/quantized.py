"""Quantised weights: the integer representation that every format, ours or a checkpoint's, is converted to.

    w[n, k] = (levels[n, k] - zeros[n, g]) * scales[n, g]        g = k // group

The scales of 4-bit weights are float16 values; a back end may store them as float16, rounding any that are not. 4-bit
levels may also be `floats`: each then stands for an E2M1 number; scales are powers of two and there are no zeros.
Instead of zeros, 4-bit weights may have float16 `minima`:

    w[n, k] = levels[n, k] * scales[n, g] + minima[n, g]

With `activation_bits` 8 the layer's input is quantised too, on the fly and separately for each token:

    a[t, k] = round(x[t, k] * (127 / m[t, g]))        s[t, g] = m[t, g] * (1 / 127)        m[t, g] = max |x[t, group g]|

in float32, with one rounding per operation, ties to even, so that every back end gets the same integers; a is 0 where
m is below FAINT. The layer is then

    y[t, n] = sum over g of s[t, g] * scales[n, g] * sum over k of (levels[n, k] - zeros[n, g]) * a[t, k]

with an exact inner sum; minima are multiplied by the sum of a[t, k], which is exact, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

MAX_ACTIVATION = 127
FAINT = 2.0**-100
FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1 by bit pattern
FAINTEST_SCALE = torch.finfo(torch.float16).tiny
AT_ONCE = 1 << 19  # weights widened or quantised together: as many as a cache holds in float32


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix is stored. `group`: the number of inputs that share a scale; 0: all, or all of a segment."""

    bits: int
    group: int
    activation_bits: int
    floats: bool = False
    minima: bool = False


FORMATS = {
    "int8": Format(bits=8, group=0, activation_bits=8),
    "int4": Format(bits=4, group=64, activation_bits=8),
    "int4a16": Format(bits=4, group=64, activation_bits=16),
}


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A matrix [N, K] in levels 0 .. 2**bits - 1. If it has no zeros and no minima, the middle level, 2**(bits - 1), is
    zero everywhere."""

    levels: torch.Tensor  # [N, K] uint8
    scales: torch.Tensor  # [N, K / group] float32
    zeros: torch.Tensor | None  # [N, K / group] uint8
    bits: int
    activation_bits: int
    floats: bool = False
    minima: torch.Tensor | None = None  # [N, K / group] float32

    @property
    def shape(self) -> torch.Size:
        """[N, K]"""
        return self.levels.shape

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]


Weight = torch.Tensor | QuantizedWeight


def by_rows(weight: Weight, move: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """The weight with its rows rearranged by `move`, which is applied to tensors [N, ..]."""
    if isinstance(weight, torch.Tensor):
        return move(weight)
    return replace(by_groups(weight, move), levels=move(weight.levels))


def by_groups(weight: QuantizedWeight, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
    """The weight with `change` applied to what its groups have: scales, and zeros or minima."""
    zeros = None if weight.zeros is None else change(weight.zeros)
    minima = None if weight.minima is None else change(weight.minima)
    return replace(weight, scales=change(weight.scales), zeros=zeros, minima=minima)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The rows of all parts, which differ at most in whether they have zeros, in one matrix."""
    zeros, minima = None, [part.minima for part in parts if part.minima is not None]
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts])
    return replace(
        parts[0],
        levels=torch.cat([part.levels for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=zeros,
        minima=torch.cat(minima) if minima else None,
    )


def _zeros(part: QuantizedWeight) -> torch.Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full(part.scales.shape, 1 << part.bits - 1, dtype=torch.uint8, device=part.scales.device)


def quantize(weight: torch.Tensor, form: Format) -> QuantizedWeight:
    """weight [N, K] -> the nearest levels, where the middle level is zero. K must be a multiple of the group. Rows are
    quantised a few at a time, as they do not depend on one another.

    With 8 bits, the scale maps the largest magnitude of its group to the highest level. With 4 bits that would waste
    one level of sixteen, so the value of largest magnitude, whatever its sign, becomes level 0, the one farthest from
    the middle, and scales may be negative. A weight of nearly that magnitude and opposite sign is then off by up to one
    level, but the mean square error of Gaussian weights is still a fifth lower.
    """
    parts = [_quantize(part, form) for part in torch.split(weight, max(1, AT_ONCE // weight.shape[1]))]
    levels, scales = (torch.cat(one) for one in zip(*parts, strict=True))
    return around_the_middle(levels, scales, form)


def around_the_middle(levels: torch.Tensor, scales: torch.Tensor, form: Format) -> QuantizedWeight:
    """The weight with these levels [N, K] and scales [N, K / group], where the middle level is zero."""
    return QuantizedWeight(
        levels=levels,
        scales=scales,
        zeros=None,
        bits=form.bits,
        activation_bits=form.activation_bits,
        floats=form.floats,
    )


def _quantize(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and scales."""
    group = form.group or weight.shape[1]
    middle = 1 << form.bits - 1
    grouped = weight.float().reshape(len(weight), -1, group)
    of_four = form.bits == 4
    scales = (_extremes(grouped) / -middle).half().float() if of_four else grouped.abs().amax(-1) / (middle - 1)
    scales = torch.where(scales.abs() < FAINTEST_SCALE, FAINTEST_SCALE, scales)
    levels = (grouped / scales.unsqueeze(-1)).round_().clamp_(-middle, middle - 1).add_(middle)
    return levels.to(torch.uint8).flatten(1), scales


def _extremes(grouped: torch.Tensor) -> torch.Tensor:
    """The value of largest magnitude in each group [.., G]; the first in case of a tie."""
    most, least = grouped.amax(-1), grouped.amin(-1)
    extremes = torch.where(most > -least, most, least)
    tied = most == -least  # few: only these need the argmax, which takes several times as long
    groups = grouped[tied]
    extremes[tied] = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    return extremes


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """[N, K] float32"""
    if weight.floats:
        known = torch.tensor(FLOATS, device=weight.levels.device)
        grouped = known[weight.levels.long()].view(len(weight.levels), -1, weight.group)
        return (grouped * weight.scales.unsqueeze(-1)).flatten(1)
    grouped = weight.levels.reshape(len(weight.levels), -1, weight.group).float()
    if weight.minima is not None:
        return (grouped * weight.scales.unsqueeze(-1) + weight.minima.unsqueeze(-1)).flatten(1)
    zeros = 1 << weight.bits - 1 if weight.zeros is None else weight.zeros.float().unsqueeze(-1)
    return ((grouped - zeros) * weight.scales.unsqueeze(-1)).flatten(1)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 -> 2**(exponent - 127) float32; 0 gives 0, and 255 infinity."""
    return (exponents.int() << 23).view(torch.float32)


def exponents(powers: torch.Tensor) -> torch.Tensor:
    """The inverse of `powers`, as uint8."""
    return (powers.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def round_activations(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [T, K] as a layer with `activation_bits` 8 sees it: scale * integer, float32."""
    grouped = x.float().reshape(len(x), -1, group)
    most = grouped.abs().amax(-1, keepdim=True)
    # Not `127 / most`, which torch computes as 127 * (1 / most).
    inverse = torch.where(most >= FAINT, torch.full_like(most, MAX_ACTIVATION) / most, 0)
    return ((grouped * inverse).round_() * (most * (1 / MAX_ACTIVATION))).flatten(1)
