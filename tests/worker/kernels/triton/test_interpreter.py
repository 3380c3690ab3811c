"""What the other tests assume of whatever runs the kernels; these tests judge new versions of Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.worker.kernels.triton.support import DEVICE, DTYPES

ROWS, WIDTH = 64, 128
MOVED = 5


@triton.jit
def sum_kernel(count: Any, out: Any):
    total = 0
    for number in range(tl.load(count)):
        total += number
    tl.store(out, total)


@triton.jit
def cast_kernel(values: Any, out: Any, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, tl.load(values + lanes).to(out.dtype.element_ty))


@triton.jit
def dot_kernel(left: Any, right: Any, out: Any, M: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, K)
    square = tl.load(right + columns[:, None] * K + columns[None, :])
    lanes = rows[:, None] * K + columns[None, :]
    tl.store(out + lanes, tl.dot(tl.load(left + lanes), square, input_precision="ieee"))


@triton.jit
def mixed_kernel(tall: Any, wide: Any, out: Any, M: tl.constexpr, K: tl.constexpr):
    """Columns, rows, numbers and single values, both integer and floating."""
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    x, y, one = tl.load(tall + rows), tl.load(wide + columns), tl.load(wide)
    whole = (x * 2 + columns) // 3 % 7 - one.to(tl.int32)
    chosen = tl.where(rows > columns, whole + 1.0, tl.where(columns < 4, 1, 0))
    lanes = tl.minimum(rows, M - 1) * K + columns
    tl.store(out + lanes, chosen * y + tl.maximum(one, y * 0.5), mask=(rows < M - 1) & (columns > 0))


def dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = torch.empty(ROWS, WIDTH, device=DEVICE)
    dot_kernel[(1,)](left.to(DEVICE), right.to(DEVICE), out, ROWS, WIDTH)
    return out.cpu()


def test_a_loaded_number_bounds_a_loop() -> None:
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sum_kernel[(1,)](torch.full((1,), 7, dtype=torch.int32, device=DEVICE), out)
    assert out.item() == 21


@pytest.mark.parametrize(("tall", "wide"), [(torch.int32, torch.float32), (torch.int64, torch.float64)])
def test_operands_of_all_shapes_and_types_meet(tall: torch.dtype, wide: torch.dtype) -> None:
    x, y = torch.randint(0, 99, (ROWS,)).to(tall), torch.randint(-8, 9, (WIDTH,)).to(wide) / 4
    out = torch.zeros(ROWS, WIDTH, dtype=wide, device=DEVICE)
    mixed_kernel[(1,)](x.to(DEVICE), y.to(DEVICE), out, ROWS, WIDTH)
    rows, columns = torch.arange(ROWS)[:, None], torch.arange(WIDTH)[None, :]
    whole = (x[:, None] * 2 + columns) // 3 % 7 - y[0].int()
    chosen = torch.where(rows > columns, whole + 1.0, torch.where(columns < 4, 1.0, 0.0))
    expected = chosen * y + torch.maximum(y[0], y * 0.5)
    assert torch.equal(out.cpu(), expected.to(wide) * ((rows < ROWS - 1) & (columns > 0)))


def test_bfloat16_is_the_nearest_and_of_two_the_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, torch.inf, -torch.inf, 0.0, -0.0])
    values = torch.cat([ties, torch.randn(WIDTH - len(ties))])
    out = torch.empty(WIDTH, dtype=torch.bfloat16, device=DEVICE)
    cast_kernel[(1,)](values.to(DEVICE), out, WIDTH)
    assert torch.equal(out.cpu().view(torch.int16), values.bfloat16().view(torch.int16))
    back = torch.empty(WIDTH, device=DEVICE)
    cast_kernel[(1,)](out, back, WIDTH)
    assert torch.equal(back.cpu(), values.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_of_the_numbers(dtype: torch.dtype) -> None:
    left, right = torch.randint(-8, 9, (ROWS, WIDTH)).to(dtype), torch.randint(-8, 9, (WIDTH, WIDTH)).to(dtype)
    assert torch.equal(dot(left, right), left.float() @ right.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_is_the_same_wherever_it_stands(dtype: torch.dtype) -> None:
    left, right = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(WIDTH, WIDTH).to(dtype)
    whole = dot(left, right)
    assert torch.equal(dot(left.roll(MOVED, 0), right), whole.roll(MOVED, 0))
    alone = torch.zeros_like(left)
    alone[-1] = left[0]
    assert torch.equal(dot(alone, right)[-1], whole[0])
