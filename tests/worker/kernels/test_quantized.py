"""What quantised weights mean, in numbers to check by eye, and how far they are from the original weights."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pagoda_worker.kernels.quantized import FORMATS, Format, QuantizedWeight, dequantize, quantize, round_activations
from pagoda_worker.kernels.reference import ReferenceOps


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_within_half_a_level(name: str) -> None:
    form = FORMATS[name]
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    quantized = quantize(weight, form)
    assert quantized.group == (form.group or 256)
    assert int(quantized.levels.max()) < 1 << form.bits
    scales = quantized.scales.repeat_interleave(quantized.group, 1)
    # Four bits have no level beyond the last one on the side of zero opposite to the extreme.
    reachable = weight / scales <= (1 << form.bits - 1) - 0.5
    # 4-bit scales are rounded, so the largest weight of a group may be a little beyond the last level.
    slack = weight.abs() * 2.0**-11 if form.bits == 4 else 0
    error = (dequantize(quantized) - weight).abs()
    assert bool((error <= scales.abs() * torch.where(reachable, 0.5001, 1.0001) + slack).all())
    assert reachable.float().mean() > 0.99


def test_four_bits_spend_all_levels_on_the_extreme() -> None:
    weight = torch.tensor([[4.0, -1.0, 0.5, 3.9] + [0.0] * 28, [-4.0, 1.0, 0.0, 3.9] + [0.0] * 28])
    quantized = quantize(weight, Format(bits=4, group=32, activation_bits=8))
    assert quantized.scales.tolist() == [[-0.5], [0.5]]
    assert dequantize(quantized)[:, :4].tolist() == [[4.0, -1.0, 0.5, 4.0], [-4.0, 1.0, 0.0, 3.5]]


def test_of_two_extremes_the_first_decides_in_each_group() -> None:
    form = Format(bits=4, group=4, activation_bits=8)
    weight = torch.tensor([[4.0, -4.0, 1.0, 0.0, -2.0, 0.0, 2.0, 2.0], [1.0, 1.0, 0.0, 8.0, 0.0, -8.0, 8.0, -8.0]])
    assert quantize(weight, form).scales.tolist() == [[-0.5, 0.25], [-1.0, 1.0]]
    several = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).mul(2).round()  # most groups have ties
    firsts = [[max(group, key=abs) for group in row] for row in several.view(64, -1, 4).tolist()]
    assert quantize(several, form).scales.tolist() == [[-first / 8 or 2.0**-14 for first in row] for row in firsts]


def test_zero_stays_zero() -> None:
    for form in FORMATS.values():
        assert not dequantize(quantize(torch.zeros(2, 128), form)).any()


@pytest.mark.parametrize("name", ["int4", "int4a16"])
def test_scales_of_four_bits_are_float16(name: str) -> None:
    scales = quantize(torch.randn(8, 128) * 1e-3, FORMATS[name]).scales
    assert torch.equal(scales, scales.half().float())


def test_zeros_are_levels_per_group() -> None:
    weight = QuantizedWeight(
        levels=torch.tensor([[0, 15, 7, 8]], dtype=torch.uint8),
        scales=torch.tensor([[2.0, 0.5]]),
        zeros=torch.tensor([[3, 8]], dtype=torch.uint8),
        bits=4,
        activation_bits=16,
    )
    assert dequantize(weight).tolist() == [[-6.0, 24.0, -0.5, 0.0]]
    assert dequantize(dataclasses.replace(weight, zeros=None)).tolist() == [[-16.0, 14.0, -0.5, 0.0]]


def test_minima_are_numbers_per_group() -> None:
    weight = QuantizedWeight(
        levels=torch.tensor([[0, 15, 7, 8]], dtype=torch.uint8),
        scales=torch.tensor([[2.0, 0.5]]),
        zeros=None,
        bits=4,
        activation_bits=8,
        minima=torch.tensor([[-3.5, 0.25]]),
    )
    assert dequantize(weight).tolist() == [[-3.5, 26.5, 3.75, 4.25]]


def test_activations_are_rounded_group_by_group() -> None:
    x = torch.tensor([[127.0, -2.5, 1.5, 0.4, 0.0, 0.0, 0.0, 0.0]])
    assert round_activations(x, 4).tolist() == [[127.0, -2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]]  # ties to even


def test_faint_activations_are_nothing_and_broken_ones_stay_broken() -> None:
    assert round_activations(torch.full((1, 32), 2.0**-120), 32).abs().max() == 0
    for broken in (math.nan, math.inf):
        x = torch.ones(1, 64)
        x[0, 3] = broken
        rounded = round_activations(x, 32)
        assert not rounded[:, :32].isfinite().any()
        assert torch.equal(rounded[:, 32:], torch.ones(1, 32))


def test_the_reference_rounds_activations_only_where_the_format_says() -> None:
    ops, generator = ReferenceOps(torch.device("cpu")), torch.Generator().manual_seed(2)
    x, bias = torch.randn(3, 128, generator=generator).double(), torch.randn(16, generator=generator).double()
    for name, form in FORMATS.items():
        weight = quantize(torch.randn(16, 128, generator=generator), form)
        seen = round_activations(x, weight.group).double() if form.activation_bits == 8 else x
        expected = seen @ dequantize(weight).double().T + bias
        got = ops.linear(x, ops.pack_linear(weight, bias))
        torch.testing.assert_close(got, expected, msg=name)
