"""The kernels for quantised weights at every instruction set level, against the definition, and bit for bit against
themselves under everything that must not matter."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from tests.worker.kernels.levels import levels

from pagoda_worker.kernels.cpu.library import MIDDLE_ZERO, MINIMA, ZEROS, Library
from pagoda_worker.kernels.cpu.native import FORMS, MINIMA_FORM, NativeOps
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.quantized import FORMATS, Format, QuantizedWeight, by_groups, quantize, round_activations
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.rows.batch import Batch, batch_of_spans

pytestmark = pytest.mark.usefixtures("inference")

ROWS = (1, 2, 5, 13, 64, 200)
SHAPES = ((80, 64, 32), (96, 192, 64), (528, 256, 256), (96, 512, 128), (80, 576, 576), (80, 4096, 64))  # n, k, group
# (weight bits, activation bits), what `quant_form` says of the levels
VARIANTS = [*itertools.product(FORMS, (MIDDLE_ZERO, ZEROS)), (MINIMA_FORM, MINIMA)]
FLOAT32 = 2e-6  # of the largest output: group sums in float32, against float64

reference = ReferenceOps(torch.device("cpu"))


def make(n: int, k: int, group: int, form: tuple[int, int], kind: int) -> QuantizedWeight:
    """Levels over their whole range, including the ends."""
    bits, activation_bits = form
    levels = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    levels[0], levels[-1] = 0, (1 << bits) - 1
    return QuantizedWeight(
        levels=levels,
        scales=(torch.rand(n, k // group) / (1 << bits) + 1e-4).half().float(),
        zeros=torch.randint(0, 1 << bits, (n, k // group), dtype=torch.uint8) if kind == ZEROS else None,
        bits=bits,
        activation_bits=activation_bits,
        minima=(torch.rand(n, k // group) - 0.9).half().float() if kind == MINIMA else None,
    )


def inputs(rows: int, k: int) -> torch.Tensor:
    """Rows of very different magnitudes."""
    return (torch.randn(rows, k) * torch.logspace(-3, 2, rows)[:, None]).bfloat16()


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Row by row, relative to the row's largest value."""
    error = (got.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(error.max()) < tolerance


@pytest.mark.parametrize(("form", "kind"), VARIANTS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_against_the_definition(ops: NativeOps, n: int, k: int, group: int, form: tuple[int, int], kind: int) -> None:
    weight, bias = make(n, k, group, form, kind), torch.randn(n).bfloat16()
    packed, expected = ops.pack_linear(weight, bias), reference.pack_linear(weight, bias)
    assert packed.form == (*form, group, kind)
    for rows in ROWS if k <= 256 else (1, 13, 97):
        x = inputs(rows, k)
        y = ops.logits(x, packed)
        assert_near(y, reference.linear(x.double(), expected), FLOAT32)
        assert torch.equal(ops.linear(x, packed), y.bfloat16())


def weights_of_all_kinds() -> torch.Tensor:
    """[N, 192] float32: magnitudes from subnormal to beyond float16, groups with ties, with zeros only, and with scales
    around the least normal float16."""
    least = torch.tensor(8 * 2.0**-14)
    edges = torch.stack([least, least - 8 * 2.0**-25, *(least - 8 * 2.0**-25 * (1 + torch.tensor([-1e-6, 1e-6])))])
    edges = torch.cat([edges, -edges])[:, None] * torch.linspace(1, -0.9, 192)
    sized = torch.randn(240, 192) * torch.logspace(-42, 6, 240)[:, None]
    ties = torch.randn(64, 192).mul(2).round()
    halves = torch.arange(-96, 96).repeat(4, 1) / torch.tensor([[2.0], [4.0], [16.0], [3.0]])
    return torch.cat([sized, edges, ties, halves, torch.zeros(3, 192), -torch.zeros(3, 192)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", [*FORMATS.values(), Format(bits=8, group=32, activation_bits=8)])
def test_weights_are_rounded_as_the_definition_rounds_them(ops: NativeOps, form: Format, dtype: torch.dtype) -> None:
    weight = weights_of_all_kinds().to(dtype)
    weight = weight[weight.isfinite().all(1)]
    got, expected = ops.quantize(weight, form), quantize(weight, form)
    assert torch.equal(got.levels, expected.levels)
    assert torch.equal(got.scales, expected.scales)
    assert dataclasses.replace(got, levels=expected.levels, scales=expected.scales) == expected
    assert len(weight) > 250


def test_weights_in_any_place_of_memory_and_of_any_width_are_rounded(ops: NativeOps) -> None:
    wide = torch.randn(100, 200)
    form = Format(bits=4, group=0, activation_bits=8)
    for weight in (wide.t(), wide[3:, 16:], wide[:, :56], wide[:1]):
        got, expected = ops.quantize(weight, form), quantize(weight, form)
        assert torch.equal(got.levels, expected.levels)
        assert torch.equal(got.scales, expected.scales)


@pytest.mark.parametrize("group", [32, 96, 192])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_activations_are_the_very_numbers_of_the_definition(ops: NativeOps, bits: int, zeros: bool, group: int) -> None:
    """With the identity as the weight, each output is one rounded activation."""
    k, zero = 192, 3 if zeros else 1 << bits - 1
    x = inputs(40, k)
    x[1] = torch.arange(k) - k // 2 + 0.5
    x[1, ::group] = 127  # all others are ties
    x[2], x[3, 40:] = 0, 0
    x[4] *= 2.0**-110
    weight = QuantizedWeight(
        levels=(torch.eye(k) + zero).to(torch.uint8),
        scales=torch.ones(k, k // group),
        zeros=torch.full((k, k // group), zero, dtype=torch.uint8) if zeros else None,
        bits=bits,
        activation_bits=8,
    )
    assert torch.equal(ops.logits(x, ops.pack_linear(weight)), round_activations(x, group))


@pytest.mark.parametrize(("form", "kind"), VARIANTS)
def test_what_is_not_a_number_reaches_the_output(ops: NativeOps, form: tuple[int, int], kind: int) -> None:
    packed = ops.pack_linear(make(96, 128, 64, form, kind))
    x = inputs(3, 128)
    x[0, 5], x[2, 70] = math.nan, math.inf
    y = ops.logits(x, packed)
    assert not y[[0, 2]].isfinite().any()
    assert torch.equal(y[1], ops.logits(x[1:2], packed)[0])


@pytest.mark.parametrize(("form", "kind"), [(form, ZEROS) for form in FORMS] + [(MINIMA_FORM, MINIMA)])
def test_extremes_do_not_saturate(ops: NativeOps, form: tuple[int, int], kind: int) -> None:
    """All levels and all activations are at the ends of their ranges."""
    bits, k = form[0], 2048
    for level, zero in ((0, (1 << bits) - 1), ((1 << bits) - 1, 0)):
        weight = QuantizedWeight(
            levels=torch.full((32, k), level, dtype=torch.uint8),
            scales=torch.ones(32, 1),
            zeros=torch.full((32, 1), zero, dtype=torch.uint8) if kind == ZEROS else None,
            bits=bits,
            activation_bits=form[1],
            minima=torch.full((32, 1), -float(zero)) if kind == MINIMA else None,
        )
        for value in (127.0, -127.0):
            y = ops.logits(torch.full((3, k), value).bfloat16(), ops.pack_linear(weight))
            assert torch.equal(y, torch.full((3, 32), (level - zero) * value * k))


@pytest.mark.parametrize(("form", "kind"), VARIANTS)
def test_bits_do_not_depend_on_company_or_threads(ops: NativeOps, form: tuple[int, int], kind: int) -> None:
    """Enough rows for several blocks."""
    packed, x = ops.pack_linear(make(96, 4096, 64, form, kind)), inputs(300, 4096)
    whole = ops.logits(x, packed)
    for size in (1, 7):
        parts = x[:29].split(size)
        assert torch.equal(torch.cat([ops.logits(part, packed) for part in parts]), whole[:29])
    for threads in (1, 3):
        library = Library([-1] * threads, ops.library.level)
        assert torch.equal(NativeOps(library).logits(x, packed), whole)
        library.close()


@pytest.mark.parametrize(("form", "kind"), VARIANTS)
@pytest.mark.parametrize(("k", "group", "segments"), [(2240, 2240, 1), (4480, 2240, 2), (1536, 64, 8), (1344, 64, 1)])
def test_groups_that_come_in_parts_and_several_at_once(
    ops: NativeOps, k: int, group: int, segments: int, form: tuple[int, int], kind: int
) -> None:
    """For any number of rows in a tile and any number of blocks."""
    weight, x = make(40, k, group, form, kind), inputs(300, k)
    packed, expected = ops.pack_linear(weight, None, segments), reference.pack_linear(weight, None, segments)
    whole = ops.logits(x, packed)
    assert_near(whole, reference.linear(x.double(), expected), FLOAT32)
    for size in (1, 3, 17, 33, 70, 130):
        parts = x[:140].split(size)[: 5 if size < 20 else None]
        got = torch.cat([ops.logits(part, packed) for part in parts])
        assert torch.equal(got, whole[: len(got)])


PLAIN_OR_FORM: list[tuple[tuple[int, int] | None, int]] = [(None, MIDDLE_ZERO), *VARIANTS]


@pytest.mark.parametrize("group", [32, 608])
@pytest.mark.parametrize(("form", "kind"), PLAIN_OR_FORM)
def test_bits_of_a_row_are_the_same_in_every_tile(
    ops: NativeOps, form: tuple[int, int] | None, kind: int, group: int
) -> None:
    """One row, several rows, unpacked or not: each number of rows is divided into tiles differently."""
    n, k = 80, 608
    weight = torch.randn(n, k).bfloat16() if form is None else make(n, k, group, form, kind)
    packed, x = ops.pack_linear(weight), inputs(40, k)
    alone = torch.cat([ops.logits(row[None], packed) for row in x])
    for rows in range(2, 41):
        assert torch.equal(ops.logits(x[-rows:], packed), alone[-rows:]), rows


def test_a_thread_keeps_no_rows_from_an_earlier_call(ops: NativeOps) -> None:
    """The same memory with other contents, and another matrix whose groups round it differently."""
    x, other = inputs(5, 256), inputs(5, 256)
    first, second = (ops.pack_linear(make(96, 256, group, (8, 8), MIDDLE_ZERO)) for group in (256, 32))
    expected = ops.logits(other, first), ops.logits(other, second)
    ops.logits(x, first)
    x.copy_(other)
    assert torch.equal(ops.logits(x, first), expected[0])
    assert torch.equal(ops.logits(x, second), expected[1])


@pytest.mark.parametrize(("form", "kind"), VARIANTS)
def test_levels_of_instruction_sets_agree(form: tuple[int, int], kind: int) -> None:
    """Within a rounding: integer sums are equal, float32 sums nearly."""
    weight, x = make(96, 512, 64, form, kind), inputs(20, 512)
    outputs = []
    for level in levels():
        ops = NativeOps(Library([-1], level))
        outputs.append(ops.linear(x, ops.pack_linear(weight)).float())
    for output in outputs[1:]:
        ulp = torch.exp2(outputs[0].abs().clamp(min=1e-30).log2().floor() - 7)
        floor = outputs[0].abs().amax(-1, keepdim=True) * FLOAT32  # where a sum nearly cancels
        assert bool(((output - outputs[0]).abs() <= ulp.maximum(floor)).all())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("form", "kind"), PLAIN_OR_FORM)
@pytest.mark.parametrize("width", [96, 40])
def test_gated(ops: NativeOps, width: int, form: tuple[int, int] | None, kind: int, activation: str) -> None:
    """The epilogue on registers rounds as separate operations would."""
    weight = torch.randn(2 * width, 128).bfloat16() / 11 if form is None else make(2 * width, 128, 32, form, kind)
    bias, x = torch.randn(2 * width).bfloat16(), torch.randn(14, 128).bfloat16()
    fused = ops.gated_linear(x, ops.pack_gated(weight, bias), activation)
    gate, up = ops.linear(x, ops.pack_linear(weight, bias)).chunk(2, -1)
    act = F.silu(gate.double()) if activation == "silu" else F.gelu(gate.double(), approximate="tanh")
    expected = act.bfloat16().double() * up.double()
    assert fused.shape == (14, width)
    assert_near(fused, expected, 2.0**-8)


def assert_in_bfloat16(ops: NativeOps, weight: QuantizedWeight) -> None:
    packed, x = ops.pack_linear(weight), inputs(5, weight.shape[1])
    assert packed.form[0] == 16
    exact = reference.pack_linear(dataclasses.replace(weight, activation_bits=16))
    assert_near(ops.logits(x, packed), reference.linear(x.double(), exact), 2.0**-8)


UNKNOWN = {
    "8 bits with activations as they are": ((8, 16), 64),
    "an odd group": ((4, 16), 48),
    "an odd group, activations of 8 bits": ((8, 8), 16),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_there_is_no_kernel_for_is_computed_in_bfloat16(ops: NativeOps, name: str) -> None:
    form, group = UNKNOWN[name]
    assert_in_bfloat16(ops, make(80, 192, group, form, ZEROS))


def test_scales_and_minima_that_float16_cannot_hold_are_not_packed_as_such(ops: NativeOps) -> None:
    weight = make(32, 64, 32, (4, 16), MIDDLE_ZERO)
    for factor in (1e-9, 1e9):
        assert_in_bfloat16(ops, dataclasses.replace(weight, scales=weight.scales * factor))
    assert_in_bfloat16(ops, dataclasses.replace(make(32, 64, 32, MINIMA_FORM, MINIMA), minima=torch.full((32, 2), 1e5)))


def test_scales_and_minima_that_are_tiny_in_float16_are_packed(ops: NativeOps) -> None:
    """As those of an expert that was pruned: it must have the form of the others."""
    weight, x = make(32, 64, 32, MINIMA_FORM, MINIMA), inputs(2, 64)
    for factor in (2.0**-20, 0.0):
        kept = by_groups(weight, lambda values, factor=factor: (values * factor).half().float())  # type: ignore[misc]
        packed = ops.pack_linear(kept)
        assert packed.form == (*MINIMA_FORM, 32, MINIMA)
        exact = reference.linear(x.double(), reference.pack_linear(kept))
        torch.testing.assert_close(
            ops.logits(x, packed).double(), exact, rtol=1e-4, atol=FLOAT32 * float(exact.abs().max())
        )


def test_a_minimum_of_zero_adds_nothing_to_the_largest_row(ops: NativeOps) -> None:
    weight = by_groups(make(32, 64, 32, MINIMA_FORM, MINIMA), lambda values: values / 16)
    weight = dataclasses.replace(weight, minima=torch.zeros(32, 2))
    x = torch.full((1, 64), 2e37).bfloat16()
    exact = reference.linear(x.double(), reference.pack_linear(weight))
    assert_near(ops.logits(x, ops.pack_linear(weight)), exact, FLOAT32)


def test_minima_and_activations_as_they_are_have_no_kernel(ops: NativeOps) -> None:
    assert_in_bfloat16(ops, make(32, 64, 32, (4, 16), MINIMA))


@pytest.mark.parametrize("form", FORMS)
def test_recorded_equals_immediate(ops: NativeOps, form: tuple[int, int]) -> None:
    width = 64
    up = ops.pack_gated(make(2 * width, width, 32, form, ZEROS), torch.randn(2 * width).bfloat16())
    down, table = ops.pack_linear(make(width, width, 32, form, MIDDLE_ZERO)), inputs(50, width)
    norm = torch.ones(width)

    def forward(ops: Ops, batch: Batch, kv: object) -> tuple[torch.Tensor, ...]:
        x = ops.embed(batch.token_ids, table, None)
        for _ in range(3):  # buffers are reused: the same memory, other rows
            x = ops.rms_norm(ops.linear(ops.gated_linear(x, up, "silu"), down), norm, 1e-6)
        return x, ops.logits(x, down)

    kv = ops.new_kv_cache(KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.bfloat16), 2, 16)
    recorded = ops.record(forward, [kv], 40)
    for count in (1, 13, 40):
        batch = dataclasses.replace(
            batch_of_spans([(0, count)], torch.zeros(1, 1, dtype=torch.int32)), token_ids=torch.randint(0, 50, (count,))
        )
        for got, expected in zip(recorded(batch), forward(ops, batch, kv), strict=True):
            assert torch.equal(got, expected)
