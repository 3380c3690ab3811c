"""Mixture of experts by every back end on a CPU: near the reference, and a token's bits its own."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tests.worker.kernels.levels import levels

from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.quantized import FORMATS, Weight, quantize
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.kernels.routing import Beside, Routing, choose, combine

pytestmark = pytest.mark.usefixtures("inference")

CPU = torch.device("cpu")
reference = ReferenceOps(CPU)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
BACKENDS = [("torch", torch.bfloat16), ("torch", torch.float32), *((level, torch.bfloat16) for level in levels())]
TOKENS, HIDDEN, WIDTH, EXPERTS = 45, 64, 96, 11


@cache
def ops_of(name: str, dtype: torch.dtype, threads: int = 2) -> Ops:
    return AtenOps(CPU, dtype) if name == "torch" else NativeOps(Library([-1] * threads, name))


@pytest.fixture(params=BACKENDS, ids=lambda one: f"{one[0]}-{one[1]}".replace("torch.", ""))
def backend(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    name, dtype = request.param
    return name, dtype


class Case(NamedTuple):
    x: torch.Tensor
    logits: torch.Tensor
    weights: list[tuple[Weight, Weight]]
    beside: Beside | None


def case(dtype: torch.dtype, form: str = "", shared: bool = False, gated: bool = False) -> Case:
    generator = torch.Generator().manual_seed(6)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    plain = [
        ((numbers(2 * WIDTH, HIDDEN) / 8).to(dtype), (numbers(HIDDEN, WIDTH) / 8).to(dtype)) for _ in range(EXPERTS)
    ]
    weights: list[tuple[Weight, Weight]] = [
        (quantize(up, FORMATS[form]), quantize(down, FORMATS["int8"])) if form else (up, down) for up, down in plain
    ]
    logits = numbers(TOKENS, EXPERTS) * 2
    logits[:, 3] -= 20  # nobody's
    logits[5, 7] = logits[5, 2] = logits[5].max() + 1  # a tie
    beside = Beside(numbers(TOKENS, HIDDEN).to(dtype), numbers(TOKENS, 1) if gated else None) if shared else None
    return Case(numbers(TOKENS, HIDDEN).to(dtype), logits, weights, beside)


def moe(ops: Ops, made: Case, routing: Routing, rows: slice = slice(None), packed: Any = None) -> torch.Tensor:
    beside, packed = made.beside, packed or ops.pack_experts(iter(made.weights), EXPERTS)
    if beside is not None:
        beside = Beside(beside.product[rows], None if beside.gate is None else beside.gate[rows].contiguous())
    return ops.moe(made.x[rows], made.logits[rows].contiguous(), packed, routing, "silu", beside).clone()


def wide(made: Case) -> Case:
    weights = [tuple(one.double() if isinstance(one, torch.Tensor) else one for one in pair) for pair in made.weights]
    beside = made.beside and Beside(made.beside.product.double(), made.beside.gate)
    return Case(made.x.double(), made.logits, weights, beside)  # type: ignore[arg-type]


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize(("shared", "gated"), [(False, False), (True, False), (True, True)])
def test_it_is_near_the_reference(
    backend: tuple[str, torch.dtype], renormalised: bool, shared: bool, gated: bool
) -> None:
    (name, dtype), routing = backend, Routing(experts=EXPERTS, chosen=3, renormalised=renormalised)
    made = case(dtype, shared=shared, gated=gated)
    got, expected = moe(ops_of(name, dtype), made, routing), moe(reference, wide(made), routing)
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("form", ["", "int8", "int4"])
def test_a_token_is_its_own(backend: tuple[str, torch.dtype], form: str) -> None:
    """Alone, in any company and by any number of threads."""
    (name, dtype), routing = backend, Routing(experts=EXPERTS, chosen=4, renormalised=True)
    made = case(dtype, form, shared=True, gated=True)
    ops = ops_of(name, dtype)
    packed = ops.pack_experts(iter(made.weights), EXPERTS)
    whole = moe(ops, made, routing, packed=packed)
    for rows in (slice(5, 6), slice(0, 2), slice(7, 31), slice(30, TOKENS)):
        assert torch.equal(moe(ops, made, routing, rows, packed), whole[rows]), rows
    for threads in (1, 3):
        assert torch.equal(moe(ops_of(name, dtype, threads), made, routing, packed=packed), whole)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("level", levels())
def test_quantised_experts(level: str, form: str) -> None:
    routing = Routing(experts=EXPERTS, chosen=2, renormalised=True)
    made = case(torch.bfloat16, form)
    got, expected = moe(ops_of(level, torch.bfloat16), made, routing), moe(reference, wide(made), routing)
    assert (got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[torch.bfloat16]


def test_ties_go_to_the_lowest_id_and_ranks_are_added_in_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    ids, weights = choose(logits, Routing(experts=4, chosen=3, renormalised=True))
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    torch.testing.assert_close(weights[1], torch.full((3,), 1 / 3))
    _, shares = choose(logits, Routing(experts=4, chosen=3, renormalised=False))
    torch.testing.assert_close(shares, logits.softmax(-1).gather(-1, ids))
    products = torch.tensor([[[2.0**24], [1.0], [-(2.0**24)]]])
    assert combine(products, torch.ones(1, 3), None).item() == 0.0  # 2**24 + 1 is 2**24
    assert combine(products.flip(1), torch.ones(1, 3), Beside(torch.ones(1, 1), torch.zeros(1, 1))).item() == 1.5
