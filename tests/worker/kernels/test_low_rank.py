"""LoRA terms added to linear layers, per operation: close to float64, and zero for tokens without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.ops import Added, LowRank, Ops
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.rows.slots import TokenSlots

pytestmark = pytest.mark.usefixtures("inference")
CPU = torch.device("cpu")
TOLERANCE = 1.2e-2  # relative to the largest value: up to three roundings to bfloat16
INPUTS, OUTPUTS = 54, 96  # the number of inputs is no multiple of a vector
RANKS = ((8,), (1, 17), ())  # of each adapter's parts; a part adds to its own share of the outputs
SLOTS = [0, 0, 0, 0, 0, -1, 1, -1, -1, -1, -1, 2, 2, 2, 2, 1, 0, 1, 1, 1, 1, 1]
Call = Callable[[Any, Any, Any, Any], torch.Tensor]
CALLS: dict[str, Call] = {
    "linear": lambda ops, x, packed, added: ops.linear(x, packed, added),
    "gated": lambda ops, x, packed, added: ops.gated_linear(x, packed, "silu", added),
    "activated": lambda ops, x, packed, added: ops.activated_linear(x, packed, "relu", added),
    "logits": lambda ops, x, packed, added: ops.logits(x, packed, 30.0, added),
}


def low_rank(ranks: tuple[int, ...]) -> LowRank | None:
    if not ranks:
        return None
    share, total = OUTPUTS // len(ranks), sum(ranks)
    b, spans = torch.zeros(OUTPUTS, total), torch.zeros(OUTPUTS, 2, dtype=torch.int32)
    for index, rank in enumerate(ranks):
        first, lines = sum(ranks[:index]), slice(index * share, (index + 1) * share)
        b[lines, first : first + rank] = torch.randn(share, rank) * 0.3
        spans[lines] = torch.tensor([first, first + rank], dtype=torch.int32)
    a = torch.randn(total, INPUTS) * 0.3
    return LowRank(a.bfloat16(), b.bfloat16(), torch.linspace(0.5, 2.0, total), spans)


def compare(ops: Ops, call: str) -> None:
    """Compare one operation of a back end with the float64 reference, and each token in the batch with itself alone."""
    x, weight, bias = (
        (torch.randn(*shape) * size).bfloat16().to(ops.device)
        for shape, size in (((len(SLOTS), INPUTS), 1.0), ((OUTPUTS, INPUTS), 0.2), ((OUTPUTS,), 1.0))
    )
    factors = [low_rank(ranks) for ranks in RANKS]
    tokens, found = TokenSlots(np.array(SLOTS, np.int32), ops.device), []
    for one, dtype in ((ops, torch.bfloat16), (ReferenceOps(ops.device), torch.float64)):
        pack = one.pack_gated if call == "gated" else one.pack_linear
        packed = pack(weight.to(dtype), bias.to(dtype))
        slots = one.new_slots(packed, len(factors), 18, gated=call == "gated")
        for slot, adapter in enumerate(factors):
            wide = adapter and adapter._replace(a=adapter.a.to(dtype), b=adapter.b.to(dtype))
            one.fill_slot(slots, slot, wide)
        run = CALLS[call]
        result = run(one, x.to(dtype), packed, Added(slots, tokens)).clone()
        base = run(one, x.to(dtype), packed, None).clone()
        found.append((result.double(), base.double()))
        for place, slot in enumerate(SLOTS):
            alone = TokenSlots(tokens.slots[place : place + 1], ops.device)
            if one is ops and ops.batch_invariant:
                line = run(one, x[place : place + 1].to(dtype), packed, Added(slots, alone))
                assert torch.equal(line[0], result[place]), f"token {place} notices others"
            if slot in (-1, 2):
                assert torch.equal(result[place], base[place]), f"token {place} has no adapter"
    (got, base), (expected, _) = found
    assert (got - expected).abs().max() / expected.abs().max() < TOLERANCE
    assert (got - base).abs().max() / expected.abs().max() > 10 * TOLERANCE, "adapters change nothing"


@pytest.mark.parametrize("call", CALLS)
def test_torch(call: str) -> None:
    compare(AtenOps(CPU, torch.bfloat16), call)


@pytest.mark.parametrize("call", CALLS)
def test_native(call: str, ops: NativeOps) -> None:
    compare(ops, call)


def test_a_slot_that_is_given_away_adds_what_its_new_adapter_adds(ops: NativeOps) -> None:
    x, weight = torch.randn(3, INPUTS).bfloat16(), torch.randn(OUTPUTS, INPUTS).bfloat16()
    packed = ops.pack_linear(weight)
    slots, fresh = ops.new_slots(packed, 1, 8), ops.new_slots(packed, 1, 8)
    first, second = low_rank((8,)), low_rank((4, 4))
    added = TokenSlots(np.array([0, -1, 0], np.int32), CPU)
    ops.fill_slot(slots, 0, first)
    before = ops.linear(x, packed, Added(slots, added)).clone()
    for one in (slots, fresh):
        ops.fill_slot(one, 0, second)
    after = ops.linear(x, packed, Added(slots, added)).clone()
    assert torch.equal(after, ops.linear(x, packed, Added(fresh, added)))
    assert not torch.equal(after[0], before[0])
    ops.fill_slot(slots, 0, None)
    assert torch.equal(ops.linear(x, packed, Added(slots, added)), ops.linear(x, packed))
