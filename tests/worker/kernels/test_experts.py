"""Mixture of experts on every CPU back end: close to the reference, and a token's bits do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from typing import Any, NamedTuple

import pytest
import torch
from tests.worker.kernels.backends import TOLERANCE, ops_of
from tests.worker.kernels.levels import levels

from pagoda_worker.kernels.cpu.library import FLOAT_LEVELS, MINIMA
from pagoda_worker.kernels.ops import CLAMPED, BackendError, Expert, Ops
from pagoda_worker.kernels.quantized import FORMATS, QuantizedWeight, Weight, by_groups, powers, quantize
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.kernels.routing import Beside, Routing, choose, combine

pytestmark = pytest.mark.usefixtures("inference")

CPU = torch.device("cpu")
reference = ReferenceOps(CPU)
TOKENS, HIDDEN, WIDTH, EXPERTS = 45, 64, 96, 11


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
    logits[:, 3] -= 20  # chosen by no token
    logits[5, 7] = logits[5, 2] = logits[5].max() + 1  # a tie
    beside = Beside(numbers(TOKENS, HIDDEN).to(dtype), numbers(TOKENS, 1) if gated else None) if shared else None
    return Case(numbers(TOKENS, HIDDEN).to(dtype), logits, weights, beside)


def moe(ops: Ops, made: Case, routing: Routing, rows: slice = slice(None), packed: Any = None) -> torch.Tensor:
    beside, packed = made.beside, packed or ops.pack_experts(starmap(Expert, made.weights), EXPERTS)
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
    """The same bits alone, in any batch and with any number of threads."""
    (name, dtype), routing = backend, Routing(experts=EXPERTS, chosen=4, renormalised=True)
    made = case(dtype, form, shared=True, gated=True)
    ops = ops_of(name, dtype)
    packed = ops.pack_experts(starmap(Expert, made.weights), EXPERTS)
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


ROUTINGS = {
    "scaled": Routing(experts=EXPERTS, chosen=3, renormalised=False, scale=2.5),
    "groups": Routing(experts=12, chosen=3, renormalised=False, scale=1.5, groups=4, chosen_groups=2),
    "sigmoid": Routing(experts=EXPERTS, chosen=4, renormalised=False, sigmoid=True),
    "sigmoid-groups": Routing(
        experts=12, chosen=4, renormalised=True, sigmoid=True, scale=2.5, groups=3, chosen_groups=2, group_top=2
    ),
    "all": Routing(experts=EXPERTS, chosen=EXPERTS, renormalised=True),
    "one": Routing(experts=1, chosen=1, renormalised=True),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_ways_of_choosing(backend: tuple[str, torch.dtype], name: str) -> None:
    """Close to the definition, which is written out again here, and each token independent of the batch."""
    (ops_name, dtype), routing = backend, ROUTINGS[name]
    ops, made = ops_of(ops_name, dtype), drawn(dtype, routing.experts)
    packed = ops.pack_experts(starmap(Expert, made.weights), routing.experts, made.favour if routing.sigmoid else None)
    got = ops.moe(made.x, made.logits, packed, routing, "silu").clone()
    expected = plainly(made, routing, 9)
    assert (got[:9].double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]
    for row in (0, 7, TOKENS - 1):
        alone = ops.moe(made.x[row : row + 1], made.logits[row : row + 1].contiguous(), packed, routing, "silu")
        assert torch.equal(alone[0], got[row])


class Drawn(NamedTuple):
    x: torch.Tensor
    logits: torch.Tensor
    weights: list[tuple[torch.Tensor, torch.Tensor]]
    favour: torch.Tensor


def drawn(dtype: torch.dtype, experts: int) -> Drawn:
    generator = torch.Generator().manual_seed(8)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    sizes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    weights = [tuple((numbers(*size) / 8).to(dtype) for size in sizes) for _ in range(experts)]
    return Drawn(numbers(TOKENS, HIDDEN).to(dtype), numbers(TOKENS, experts) * 2, weights, numbers(experts))  # type: ignore[arg-type]


def plainly(made: Drawn, routing: Routing, tokens: int) -> torch.Tensor:
    """Computes the first tokens one by one in float64."""
    rows = []
    for x, logits in zip(made.x[:tokens].double(), made.logits[:tokens].double(), strict=True):
        shares = torch.sigmoid(logits) if routing.sigmoid else logits.softmax(-1)
        scores = shares + made.favour if routing.sigmoid else shares
        groups = scores.view(routing.groups, -1).topk(routing.group_top).values.sum(-1)
        best = groups.topk(routing.chosen_groups).indices.tolist()
        size = routing.experts // routing.groups
        open_to = [expert for expert in range(routing.experts) if routing.groups == 1 or expert // size in best]
        chosen = sorted(open_to, key=lambda expert: -scores[expert].item())[: routing.chosen]
        total = sum(shares[expert].item() for expert in chosen) if routing.renormalised else 1.0
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert in chosen:
            gate_up, down = (one.double() for one in made.weights[expert])
            gate, up = (gate_up @ x).chunk(2)
            row += shares[expert] / total * routing.scale * (down @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 3, TOKENS])
def test_biases_and_clamped_gates(backend: tuple[str, torch.dtype], tokens: int) -> None:
    (name, dtype), routing = backend, Routing(experts=5, chosen=2, renormalised=True)
    generator = torch.Generator().manual_seed(9)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    experts = [
        Expert(numbers(2 * WIDTH, HIDDEN), numbers(HIDDEN, WIDTH) / 8, numbers(2 * WIDTH), numbers(HIDDEN))
        for _ in range(routing.experts)
    ]  # gates of 8 and more: many get clamped
    x, logits = numbers(tokens, HIDDEN), numbers(tokens, routing.experts).float()
    ops = ops_of(name, dtype)
    packed = ops.pack_experts(iter(experts), routing.experts)
    got = ops.moe(x, logits, packed, routing, CLAMPED).clone()
    ids, weights = choose(logits, routing)
    for row in range(tokens):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            gate_up, down, up_bias, down_bias = (one.double() for one in experts[expert])  # type: ignore[union-attr]
            gate, up = (gate_up @ x[row].double() + up_bias).chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            expected += weight * (down @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + down_bias)
        assert (got[row].double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]
        assert torch.equal(ops.moe(x[row : row + 1], logits[row : row + 1], packed, routing, CLAMPED)[0], got[row])


@pytest.mark.parametrize("minima", [False, True], ids=["floats", "minima"])
@pytest.mark.parametrize("level", levels())
def test_experts_of_floats_and_of_minima(level: str, minima: bool) -> None:
    """They are computed as stored: close to the reference for all scales, independent of the batch."""
    generator = torch.Generator().manual_seed(10)

    def weight(n: int, k: int) -> QuantizedWeight:
        levels = torch.randint(16, (n, k), generator=generator, dtype=torch.uint8)
        scales = powers(torch.randint(118, 127, (n, k // 32), generator=generator, dtype=torch.uint8))
        floats = QuantizedWeight(levels=levels, scales=scales, zeros=None, bits=4, activation_bits=16, floats=True)
        return replace(floats, floats=False, activation_bits=8, minima=-8 * scales) if minima else floats

    routing, tokens = Routing(experts=4, chosen=2, renormalised=True), 40
    experts = [Expert(weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH)) for _ in range(routing.experts)]
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(tokens, routing.experts, generator=generator)
    logits[3:, 1] += 30.0  # one expert gets nearly all tokens
    ops = ops_of(level, torch.bfloat16)
    packed = ops.pack_experts(iter(experts), routing.experts)
    assert packed.down.form == ((4, 8, 32, MINIMA) if minima else (4, 16, 32, FLOAT_LEVELS))
    got = ops.moe(x, logits, packed, routing, "silu").clone()
    expected = reference.moe(x.double(), logits, reference.pack_experts(iter(experts), 4), routing, "silu")
    assert (got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[torch.bfloat16]
    for row in (0, 5, 39):
        assert torch.equal(ops.moe(x[row : row + 1], logits[row : row + 1], packed, routing, "silu")[0], got[row])


def test_an_expert_that_was_pruned_has_the_form_of_the_others() -> None:
    weight = QuantizedWeight(
        levels=torch.randint(16, (2 * WIDTH, HIDDEN), dtype=torch.uint8),
        scales=torch.ones(2 * WIDTH, 2),
        zeros=None,
        bits=4,
        activation_bits=8,
        minima=torch.full((2 * WIDTH, 2), -8.0),
    )
    faint, nothing = by_groups(weight, lambda values: values * 2.0**-24), by_groups(weight, torch.zeros_like)
    experts = [Expert(one, one) for one in (weight, faint, nothing)]
    packed = ops_of(levels()[-1], torch.bfloat16).pack_experts(iter(experts), 3)
    assert packed.gate_up.form == packed.down.form == (4, 8, 32, MINIMA)


@pytest.mark.parametrize("form", ["", "int8", "int4a16"])
def test_experts_in_different_forms_are_refused(form: str) -> None:
    made = case(torch.bfloat16, "int4")
    other = case(torch.bfloat16, form).weights[4][0]
    made.weights[4] = other, made.weights[4][1]
    with pytest.raises(BackendError, match="all experts of a layer quantised alike"):
        ops_of(levels()[-1], torch.bfloat16).pack_experts(starmap(Expert, made.weights), EXPERTS)


def test_all_tokens_with_one_expert_and_more_tokens_than_a_block(backend: tuple[str, torch.dtype]) -> None:
    (name, dtype), routing, tokens = backend, Routing(experts=EXPERTS, chosen=1, renormalised=True), 700
    made = case(dtype)
    x, logits = made.x.repeat(16, 1)[:tokens], made.logits.repeat(16, 1)[:tokens]
    logits[:, 4] = 100.0
    ops = ops_of(name, dtype)
    packed = ops.pack_experts(starmap(Expert, made.weights), EXPERTS)
    got = ops.moe(x, logits, packed, routing, "silu").clone()
    assert torch.equal(got[:TOKENS], got[TOKENS : 2 * TOKENS])
    assert torch.equal(ops.moe(x[50:53], logits[50:53].contiguous(), packed, routing, "silu"), got[50:53])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("routing", ["sigmoid-groups", "groups", "scaled"])
def test_logits_that_are_no_numbers_are_their_own_row_s(
    backend: tuple[str, torch.dtype], routing: str, bad: float
) -> None:
    (name, dtype), way = backend, ROUTINGS[routing]
    ops, made = ops_of(name, dtype), drawn(dtype, way.experts)
    packed = ops.pack_experts(starmap(Expert, made.weights), way.experts, made.favour if way.sigmoid else None)
    expected = ops.moe(made.x, made.logits, packed, way, "silu").clone()
    logits = made.logits.clone()
    logits[3] = bad
    logits[9, 5] = bad
    got = ops.moe(made.x, logits, packed, way, "silu").clone()
    others = [row for row in range(TOKENS) if row not in (3, 9)]
    assert torch.equal(got[others], expected[others])
    assert bad == -torch.inf or routing == "sigmoid-groups" or got[3].isnan().all()


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
