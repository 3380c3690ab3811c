"""Layers that sum their inputs in segments, at every instruction set level: the result is the tree sum of the segments'
own results, bit for bit, so shards of every width add up to the whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.worker.kernels.test_quantized_kernels import FLOAT32, PLAIN_OR_FORM, assert_near, inputs, make

from pagoda_worker.kernels import aten
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.library import MIDDLE_ZERO, MINIMA, ZEROS, Library
from pagoda_worker.kernels.cpu.native import MINIMA_FORM, NativeOps
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.quantized import QuantizedWeight, Weight, by_groups, dequantize
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.kernels.segments import MOST, num_segments, segmented, tree_sum

pytestmark = pytest.mark.usefixtures("inference")

CPU = torch.device("cpu")
# k, group: one group per segment of 8, several groups, two, and one with more inputs than AVX2 unpacks at a time.
SHAPES = ((512, 512), (1536, 64), (1024, 64), (4864, 4864))
N = 80
DTYPES = [torch.bfloat16, torch.float32]


def weight_of(form: tuple[int, int] | None, kind: int, k: int, group: int) -> Weight:
    return torch.randn(N, k).bfloat16() if form is None else make(N, k, group, form, kind)


def columns(weight: Weight, part: int, parts: int) -> Weight:
    """The weight columns of one of `parts` equal parts of the inputs; a scale for the whole row goes to every part."""

    def own(values: torch.Tensor) -> torch.Tensor:
        return values if values.shape[1] == 1 else values.chunk(parts, 1)[part]

    if isinstance(weight, torch.Tensor):
        return own(weight)
    return dataclasses.replace(by_groups(weight, own), levels=own(weight.levels))


def sums_of(ops: Ops, x: torch.Tensor, weight: Weight, parts: int, segments: int) -> list[torch.Tensor]:
    """Each part's own result in float32; `segments` counts the segments of all parts together."""
    shards = zip(x.chunk(parts, 1), (columns(weight, part, parts) for part in range(parts)), strict=True)
    return [ops.logits(one, ops.pack_linear(shard, None, segments // parts)) for one, shard in shards]


# --- the definition ---------------------------------------------------------------------------------------------------


def test_the_tree() -> None:
    a, b, c, d, e, f, g, h = s = torch.randn(8, 5) * torch.logspace(-4, 4, 8)[:, None]
    assert torch.equal(tree_sum(s), ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert torch.equal(tree_sum(s[:2]), a + b)
    assert torch.equal(tree_sum(s[:1]), a)


@pytest.mark.parametrize(
    ("inputs", "heads", "expected"),
    [
        ((4096, 14336), (32,), 8),
        ((2048, 3072), (16,), 4),  # eight segments would be shorter than `LEAST`
        ((896, 4864), (14,), 1),
        ((576, 1536), (9,), 1),
        ((4096, 4096), (4,), 4),
        ((4096, 4096), (4, 2), 2),
        ((4096, 4096 + 64), (8,), 1),
        ((4096, 4096 + 32), (8,), 1),
        ((4096, 96), (8,), 1),
    ],
)
def test_segments_are_whole_heads_and_not_too_short(
    inputs: tuple[int, ...], heads: tuple[int, ...], expected: int
) -> None:
    assert num_segments(inputs, heads) == expected


@pytest.mark.parametrize(("form", "kind"), [((8, 8), MIDDLE_ZERO), ((8, 8), ZEROS), (MINIMA_FORM, MINIMA)])
@pytest.mark.parametrize(
    ("k", "group", "segments", "expected_group"),
    [
        (512, 64, 8, 64),
        (512, 128, 8, 64),
        (512, 512, 8, 64),
        (1024, 128, 8, 128),
        (1536, 128, 4, 128),
        (1536, 96, 8, 96),
    ],
)
def test_a_group_of_several_segments_becomes_one_for_each(
    k: int, group: int, segments: int, expected_group: int, form: tuple[int, int], kind: int
) -> None:
    weight = make(N, k, group, form, kind)
    regrouped, fits = segmented(weight, 8)
    assert isinstance(regrouped, QuantizedWeight)
    assert (fits, regrouped.group) == (segments, expected_group)
    assert torch.equal(dequantize(regrouped), dequantize(weight))
    assert segmented(torch.ones(2, k), 8)[1] == 8


# --- native -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "kind"), PLAIN_OR_FORM)
def test_near_the_definition_in_float64(ops: NativeOps, form: tuple[int, int] | None, kind: int) -> None:
    weight, segments = segmented(weight_of(form, kind, 1024, 1024), MOST)
    wide = weight if isinstance(weight, QuantizedWeight) else weight.double()
    x = inputs(13, 1024)
    expected = ReferenceOps(CPU).pack_linear(wide, None, segments)
    assert_near(
        ops.logits(x, ops.pack_linear(weight, None, segments)),
        ReferenceOps(CPU).linear(x.double(), expected),
        FLOAT32,
    )


@pytest.mark.parametrize(("form", "kind"), PLAIN_OR_FORM)
@pytest.mark.parametrize(("k", "group"), SHAPES)
def test_shards_of_every_width_add_up_to_the_whole(
    ops: NativeOps, k: int, group: int, form: tuple[int, int] | None, kind: int
) -> None:
    """Shards of one segment are plain layers, which other tests compare with the definition."""
    weight, segments = segmented(weight_of(form, kind, k, group), MOST)
    assert segments == MOST
    bias = torch.randn(N).bfloat16()
    packed = ops.pack_linear(weight, bias, segments)
    for rows in (1, 30):
        x = inputs(rows, k)
        whole = ops.logits(x, packed)
        assert torch.equal(ops.linear(x, packed), whole.bfloat16())
        for width in (2, 4, MOST):
            assert torch.equal(tree_sum(torch.stack(sums_of(ops, x, weight, width, segments))) + bias, whole), width


@pytest.mark.parametrize(("form", "kind"), PLAIN_OR_FORM)
@pytest.mark.parametrize(("k", "group"), [(1536, 64), (1536, 1536)])
def test_bits_of_a_row_do_not_depend_on_company_or_threads(
    ops: NativeOps, k: int, group: int, form: tuple[int, int] | None, kind: int
) -> None:
    """One row, each number of rows in a tile, and several blocks."""
    weight, segments = segmented(weight_of(form, kind, k, group), MOST)
    packed, x = ops.pack_linear(weight, None, segments), inputs(300, k)
    whole = ops.logits(x, packed)
    assert torch.equal(torch.cat([ops.logits(row[None], packed) for row in x[:30]]), whole[:30])
    for rows in (*range(2, 14), 25, 40):
        assert torch.equal(ops.logits(x[-rows:], packed), whole[-rows:]), rows
    library = Library([-1] * 3, ops.library.level)
    assert torch.equal(NativeOps(library).logits(x, packed), whole)
    library.close()


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [512, 2048, 4864])
@pytest.mark.parametrize("prepacks", [True, False])
def test_torch(k: int, dtype: torch.dtype, prepacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, with shards of every width, and each row in any batch.

    MKL, which multiplies unless oneDNN's rows are independent, has independent rows on some processors only.
    """
    independent = aten.rows_are_independent
    if not prepacks:
        monkeypatch.setattr(aten, "rows_are_independent", lambda prepacked: not prepacked and independent(prepacked))
    tuned, weight, bias = AtenOps(CPU), torch.randn(N, k).to(dtype), torch.randn(N).to(dtype)
    packed, x = tuned.pack_linear(weight, bias, MOST), torch.randn(150, k).to(dtype)
    whole = tuned.logits(x, packed)
    for width in (2, 4, 8):
        sums = tree_sum(torch.stack(sums_of(tuned, x, weight, width, MOST)))
        assert torch.equal(sums + bias, whole), width
    assert torch.equal(tuned.linear(x, packed), whole.to(dtype))
    for rows in (*range(1, 18), 31, 64, 129) if tuned.batch_invariant else ():
        assert torch.equal(tuned.logits(x[9 : 9 + rows], packed), whole[9 : 9 + rows]), rows
    expected = x.double() @ weight.double().T + bias.double()
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else FLOAT32
    assert_near(whole, expected, tolerance)
