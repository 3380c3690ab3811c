"""What the other tests take for granted of whatever runs the kernels; another version of Triton is judged by these."""

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


def dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = torch.empty(ROWS, WIDTH, device=DEVICE)
    dot_kernel[(1,)](left.to(DEVICE), right.to(DEVICE), out, ROWS, WIDTH)
    return out.cpu()


def test_a_loaded_number_bounds_a_loop() -> None:
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sum_kernel[(1,)](torch.full((1,), 7, dtype=torch.int32, device=DEVICE), out)
    assert out.item() == 21


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
