"""GGUF blocks become our quantised levels: exactly where possible, and otherwise no coarser than they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.worker.checkpoints.test_blocks import blocks_of

from pagoda_worker.checkpoints.blocks import BLOCKS
from pagoda_worker.checkpoints.fingerprint import Entry
from pagoda_worker.checkpoints.formats.gguf import BlockPacking, block_layout, rounding_remark
from pagoda_worker.checkpoints.formats.layout import Stored
from pagoda_worker.kernels.quantized import Format, dequantize, exponents, powers

KEPT = {kind for kind, block in BLOCKS.items() if block.levels is not None}
EXACT = KEPT - {"Q4_K"}  # whose scales and minima are rounded to float16


def layer(kind: str) -> tuple[Stored, torch.Tensor]:
    raw = blocks_of(kind).view(8, -1)
    values = BLOCKS[kind].widened(raw, torch.float32)
    return Stored("x", (8, values.shape[1]), {"x.weight"}, lambda name: raw), values


def entry(kind: str, blocks: int = 1) -> Entry:
    block = BLOCKS[kind]
    return Entry(Path("m.gguf"), kind, (1, blocks * block.values), 0, blocks * block.num_bytes)


def test_the_levels_of_what_has_a_scale_for_32_values_are_kept() -> None:
    assert {"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "IQ4_NL", "IQ4_XS", "MXFP4"} == KEPT


@pytest.mark.parametrize("kind", sorted(EXACT))
def test_levels_are_the_values_without_rounding(kind: str) -> None:
    stored, values = layer(kind)
    packing = BlockPacking(kind)
    weight = packing.read(stored)
    assert torch.equal(dequantize(weight), values)
    assert (weight.bits, weight.group, weight.activation_bits) == (
        packing.form.bits, packing.form.group, packing.form.activation_bits,
    )  # fmt: skip
    if weight.floats:  # a back end may keep these scales as exponents
        assert torch.equal(weight.scales, powers(exponents(weight.scales)))
    elif weight.bits == 4:  # and these as float16
        assert torch.equal(weight.scales, weight.scales.half().float())
    assert (weight.minima is None) == (kind != "Q4_1")


def test_scales_and_minima_that_are_products_are_rounded_to_float16() -> None:
    stored, values = layer("Q4_K")
    weight = BlockPacking("Q4_K").read(stored)
    assert weight.minima is not None
    for kept in (weight.scales, weight.minima):
        assert torch.equal(kept, kept.half().float())
    half_a_step = 2.0**-11 * (15 * weight.scales.abs() + weight.minima.abs()).unsqueeze(-1)
    assert ((dequantize(weight) - values).view(8, -1, 32).abs() <= half_a_step * 1.001).all()
    assert not torch.equal(dequantize(weight), values)


def test_scales_beyond_float16_are_kept() -> None:
    raw = blocks_of("Q4_K").clone()
    raw[:, :4] = torch.tensor([2000.0, 2000.0], dtype=torch.float16).view(torch.uint8)
    stored = Stored("x", (8, 2048), {"x.weight"}, lambda name: raw.view(8, -1))
    expected = BLOCKS["Q4_K"].widened(raw.view(8, -1), torch.float32)
    assert torch.equal(dequantize(BlockPacking("Q4_K").read(stored)), expected)


@pytest.mark.parametrize("kind", sorted(set(BLOCKS) - KEPT))
def test_others_are_off_by_half_a_level_of_int8_at_most(kind: str) -> None:
    stored, values = layer(kind)
    found = dequantize(BlockPacking(kind).read(stored)).view(8, -1, 32)
    grouped = values.view(8, -1, 32)
    half = grouped.abs().amax(-1, keepdim=True) / 127 / 2
    assert ((found - grouped).abs() <= half * 1.0001).all()


def test_forms() -> None:
    assert BlockPacking("Q4_0").form == Format(bits=4, group=32, activation_bits=8)
    for kind in ("Q4_1", "Q4_K"):
        assert BlockPacking(kind).form == Format(bits=4, group=32, activation_bits=8, minima=True)
    assert BlockPacking("MXFP4").form == Format(bits=4, group=32, activation_bits=16, floats=True)
    assert BlockPacking("Q8_0").form == BlockPacking("Q6_K").form == Format(bits=8, group=32, activation_bits=8)


def test_only_what_lies_in_blocks_is_packed() -> None:
    plain = Entry(Path("m.gguf"), "F16", (1, 32), 0, 64)
    assert block_layout({"a.weight": plain}) is None
    layout = block_layout({"a.weight": plain, "b.weight": entry("Q4_0")})
    assert layout is not None
    assert [layout.packing_of(name) for name in "abc"] == [None, BlockPacking("Q4_0"), None]


def test_what_is_rounded_is_told_with_its_size() -> None:
    linears = {"a": (1, 1), "b": (1, 1), "c": (1, 1)}
    entries = {"a.weight": entry("Q5_K", 2**14), "b.weight": entry("Q6_K", 2**14), "c.weight": entry("Q8_0")}
    remark = rounding_remark(entries, linears)
    assert remark.startswith(
        "2 matrices of Q5_K, Q6_K, and those merged with them, are rounded to int8 in groups of 32"
    )
    assert remark.endswith("9 MiB instead of 6")
    assert rounding_remark({"c.weight": entry("Q8_0")}, linears) == ""
