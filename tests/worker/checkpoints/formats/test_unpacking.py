"""Every layout's reader against a separate writer: it reads what was written, level by level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.checkpoints.formats.packers import (
    TOKEN_SCHEME,
    Tensors,
    awq,
    awq_config,
    compressed_config,
    gptq,
    gptq_config,
    int_quantized,
    pack_quantized,
    plain,
    to_words,
    weights_scheme,
    zeros_of,
)

from pagoda_worker.checkpoints.checkpoint import DTYPES
from pagoda_worker.checkpoints.formats import read_layout
from pagoda_worker.checkpoints.formats.layout import Stored, unpacked
from pagoda_worker.kernels.quantized import QuantizedWeight, dequantize

NAME = "model.layers.0.mlp.down_proj"
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def weight_of(seed: int, shape: tuple[int, int], group: int, bits: int, symmetric: bool) -> QuantizedWeight:
    """Random levels, zeros and scales; scales are exact in float16."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if not group else shape[1] // group

    def levels(*size: int) -> torch.Tensor:
        return torch.randint(0, 1 << bits, size, generator=generator).to(torch.uint8)

    return QuantizedWeight(
        levels=levels(*shape),
        scales=torch.rand((shape[0], groups), generator=generator).add(0.01).half().float(),
        zeros=None if symmetric else levels(shape[0], groups),
        bits=bits,
        activation_bits=16,
    )


def read(config: dict[str, Any], tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    """Read through the layout that the configuration names, after a checkpoint's header checks."""
    layout = read_layout({"quantization_config": config})
    assert layout is not None
    packing = layout.packing_of(NAME)
    assert packing is not None
    wanted = packing.tensors(NAME, shape)
    assert {suffix for suffix, one in wanted.items() if not one.optional} <= set(tensors) <= set(wanted)
    for suffix, tensor in tensors.items():
        assert tuple(tensor.shape) == wanted[suffix].shape
        assert SAFETENSORS_NAMES[tensor.dtype] in wanted[suffix].dtypes
    named = {f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}
    stored = Stored(NAME, shape, named, named.__getitem__)
    assert list(packing.faults(stored)) == []
    return packing.read(stored)


def assert_same(got: QuantizedWeight, expected: QuantizedWeight, activation_bits: int = 16) -> None:
    assert torch.equal(got.levels, expected.levels)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(zeros_of(got), zeros_of(expected))
    assert (got.levels.dtype, got.scales.dtype) == (torch.uint8, torch.float32)
    assert got.zeros is None or (got.zeros.dtype == torch.uint8 and got.zeros.is_contiguous())
    assert got.levels.is_contiguous()
    assert got.scales.is_contiguous()
    assert (got.bits, got.group, got.activation_bits) == (expected.bits, expected.group, activation_bits)
    assert torch.equal(dequantize(got), plain(expected))


seeds, symmetries, widths = st.integers(0, 10**6), st.booleans(), st.sampled_from([4, 8])
group_sizes, versions = st.sampled_from([0, 16]), st.sampled_from([1, 2])


@settings(max_examples=25, deadline=None)
@given(
    seeds, widths, symmetries, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 16]), st.sampled_from([1, 2])
)
def test_gptq(seed: int, bits: int, symmetric: bool, n: int, k: int, group: int, version: int) -> None:
    shape = (8 * n, 16 * k)
    weight = weight_of(seed, shape, group, bits, symmetric)
    config = gptq_config(bits, group or -1, sym=symmetric, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    got = read(config, gptq(weight, version), shape)
    assert_same(got, weight)
    assert (got.zeros is None) == bool((zeros_of(weight) == 1 << bits - 1).all())


def test_gptq_by_hand() -> None:
    """One word: inputs 0..7 of an output have levels 0..7; zero 8 is stored as 7."""
    qweight = torch.tensor([[0x76543210] * 8], dtype=torch.int32)
    qzeros = torch.tensor([[0x77777777]], dtype=torch.int32)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": torch.full((1, 8), 0.5).half()}
    got = read(gptq_config(4, -1), tensors, (8, 8))
    assert got.levels.tolist() == [list(range(8))] * 8
    assert dequantize(got)[0].tolist() == [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]


def test_awq_by_hand() -> None:
    """One word: field i holds output 0, 2, 4, 6, 1, 3, 5, 7."""
    word = sum(output << 4 * i for i, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    words = torch.tensor([[word]], dtype=torch.int32)
    tensors = {"qweight": words.expand(2, 1).contiguous(), "qzeros": words, "scales": torch.ones(1, 8).half()}
    got = read(awq_config(-1), tensors, (8, 2))
    assert got.levels.tolist() == [[output] * 2 for output in range(8)]
    assert dequantize(got).abs().max() == 0


@settings(max_examples=25, deadline=None)
@given(seeds, symmetries, st.integers(1, 4), st.integers(1, 3), group_sizes)
def test_awq(seed: int, symmetric: bool, n: int, k: int, group: int) -> None:
    shape = (8 * n, 16 * k)
    weight = weight_of(seed, shape, group, 4, symmetric)
    assert_same(read(awq_config(group or -1), awq(weight), shape), weight)


@settings(max_examples=25, deadline=None)
@given(seeds, widths, symmetries, st.integers(1, 19), st.integers(1, 19), st.integers(0, 5))
def test_pack_quantized(seed: int, bits: int, symmetric: bool, n: int, k: int, group: int) -> None:
    """Neither the number of outputs nor of inputs needs to be a multiple of a word's fields."""
    shape = (n, k * max(group, 1))
    weight = weight_of(seed, shape, group, bits, symmetric)
    config = compressed_config("pack-quantized", weights_scheme(bits, group, symmetric), None)
    assert_same(read(config, pack_quantized(weight), shape), weight)


@settings(max_examples=25, deadline=None)
@given(seeds, symmetries, st.integers(1, 9), st.integers(1, 20))
def test_int_quantized(seed: int, symmetric: bool, n: int, k: int) -> None:
    weight = weight_of(seed, (n, k), 0, 8, symmetric)
    config = compressed_config("int-quantized", weights_scheme(8, 0, symmetric), TOKEN_SCHEME)
    assert_same(read(config, int_quantized(weight), (n, k)), weight, activation_bits=8)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_all_their_bits(bits: int) -> None:
    """Also where the highest field makes an int32 negative."""
    fields = torch.arange(1 << bits).repeat(2, 3)
    words = to_words(fields, bits)
    assert (words < 0).any()
    assert torch.equal(unpacked(words, bits, fields.shape[1]).long(), fields)
