"""LoRA terms added to this back end's layers: close to float64, and the same bits for a line in any batch."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.worker.kernels.closeness import assert_close
from tests.worker.kernels.test_low_rank import CALLS, compare
from tests.worker.kernels.triton.support import CPU, DEVICE, DTYPES, reference, walking

from pagoda_worker.kernels.ops import Added, LowRank
from pagoda_worker.kernels.triton import low_rank
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots

OUTPUTS = 150  # no multiple of a tile of columns
INPUTS = low_rank.SPLITS * low_rank.PIECE + 54  # some splits have more than one piece, and the last piece is partial
RANKS = (1, 3, 8, 16, 64)
LINES = 2 * low_rank.LINES + 5


class Case(NamedTuple):
    """Lines x [T, K], the y [T, N] that is added to, the adapters, and each line's slot."""

    x: torch.Tensor
    y: torch.Tensor
    adapters: list[LowRank | None]
    slots: list[int]


def adapter(rank: int, inputs: int, dtype: torch.dtype) -> LowRank:
    a, b = torch.randn(rank, inputs) * inputs**-0.5, torch.randn(OUTPUTS, rank) * rank**-0.5
    spans = torch.tensor([[0, rank]], dtype=torch.int32).expand(OUTPUTS, 2)
    return LowRank(a.to(dtype), b.to(dtype), torch.linspace(0.5, 2.0, rank), spans)


def case(dtype: torch.dtype, *, inputs: int = INPUTS, lines: int = LINES, ranks: tuple[int, ...] = RANKS) -> Case:
    """A case whose tiles mix lines of every adapter, of one that adds nothing here, and of none."""
    adapters = [*(adapter(rank, inputs, dtype) for rank in ranks), None]
    slots = [index % (len(adapters) + 1) - 1 for index in range(lines)]
    random.Random(1).shuffle(slots)
    return Case(torch.randn(lines, inputs).to(dtype), torch.randn(lines, OUTPUTS).to(dtype), adapters, slots)


def added(case: Case, lines: list[int], held: dict[int, int], rank: int = 64, count: int = 0) -> torch.Tensor:
    """The given lines with their LoRA terms added; `held` maps adapters to slots other than their own."""
    slots = low_rank.new_slots(case.y.to(DEVICE), count or len(case.adapters), rank)
    for index, factors in enumerate(case.adapters):
        if (slot := held.get(index, index)) >= 0:
            low_rank.fill_slot(slots, slot, factors)
    taken = [held.get(case.slots[line], case.slots[line]) for line in lines]
    y = case.y[lines].to(DEVICE)
    low_rank.add(y, case.x[lines].to(DEVICE), slots, torch.tensor(taken, dtype=torch.int64, device=DEVICE))
    return y.cpu()


def bits(y: torch.Tensor) -> torch.Tensor:
    """The bits of y as integers, so that NaN compares equal and zeros of different sign do not."""
    return y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("call", CALLS)
def test_adapters_add_what_they_should(call: str) -> None:
    compare(walking, call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [54, INPUTS])
def test_ranks_mixed_in_one_batch_are_near_float64(dtype: torch.dtype, inputs: int) -> None:
    made = case(dtype, inputs=inputs)
    wide = reference.new_slots(None, len(made.adapters), 64)
    for slot, factors in enumerate(made.adapters):
        reference.fill_slot(wide, slot, factors and factors._replace(a=factors.a.double(), b=factors.b.double()))
    tokens = TokenSlots(np.array(made.slots, np.int32), CPU)
    nothing = reference.pack_linear(torch.zeros(OUTPUTS, inputs, dtype=torch.float64))
    expected = reference.linear(made.x.double(), nothing, Added(wide, tokens))
    for rank, lines in ((rank, _lines_of(made, slot)) for slot, rank in enumerate(RANKS)):
        assert expected[lines].abs().max() > 0.5, f"rank {rank} adds nothing"
    assert_close(added(made, [*range(LINES)], {}), made.y.double() + expected)


def _lines_of(made: Case, slot: int) -> list[int]:
    return [line for line, one in enumerate(made.slots) if one == slot]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_line_has_the_same_bits_in_any_company_and_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in any order, with any others, in any slot, with room for larger ranks, however tiles are divided."""
    made = case(dtype)
    whole, rng = bits(added(made, [*range(LINES)], {})), random.Random(2)
    for line in range(0, LINES, 6):
        assert torch.equal(bits(added(made, [line], {})), whole[line : line + 1]), f"line {line} alone"
    for busy in (low_rank.BUSY, 1):
        monkeypatch.setattr(low_rank, "BUSY", busy)
        for count in (LINES, 5):
            lines = rng.sample(range(LINES), count)
            held = dict(enumerate(rng.sample(range(20), len(made.adapters))))
            assert torch.equal(bits(added(made, lines, held, rank=100, count=20)), whole[lines])


def test_a_line_does_not_notice_what_other_lines_and_adapters_hold() -> None:
    """NaN and infinities, other ranks, and adapters that have been removed."""
    made = case(torch.bfloat16)
    expected = bits(added(made, [*range(LINES)], {}))
    spoilt = _lines_of(made, 4)
    others = [line for line in range(LINES) if line not in spoilt]
    made.x[spoilt] = torch.nan
    made.adapters[4] = adapter(2, INPUTS, torch.bfloat16)._replace(scales=torch.full((2,), torch.inf))
    assert torch.equal(bits(added(made, [*range(LINES)], {}))[others], expected[others])
    for line in spoilt:
        made.slots[line] = NO_ADAPTER
    assert torch.equal(bits(added(made, [*range(LINES)], {4: -1}))[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_lines_without_an_adapter_are_not_touched(dtype: torch.dtype) -> None:
    made = case(dtype)
    plain = [line for line, slot in enumerate(made.slots) if slot in (NO_ADAPTER, len(RANKS))]
    assert {made.slots[line] for line in plain} == {NO_ADAPTER, len(RANKS)}
    made.y[plain, 0], made.y[plain, 1] = -0.0, torch.nan
    got = added(made, [*range(LINES)], {})
    assert torch.equal(bits(got[plain]), bits(made.y[plain]))
    assert torch.equal(bits(added(made, plain, {})), bits(made.y[plain]))
    changed = [line for line in range(LINES) if line not in plain]
    assert (got[changed] != made.y[changed]).any(1).all()


def test_an_empty_batch_is_none() -> None:
    assert added(case(torch.bfloat16), [], {}).shape == (0, OUTPUTS)


def test_there_may_be_more_adapters_than_lines_of_a_tile() -> None:
    """There are as many adapters in use as lines, and more that are not in use."""
    ranks = tuple(1 + index % 5 for index in range(LINES + 3))
    made = case(torch.float32, inputs=24, ranks=ranks)._replace(slots=random.Random(3).sample(range(LINES), LINES))
    expected = made.y.double()
    for line, slot in enumerate(made.slots):
        factors = made.adapters[slot]
        assert factors is not None
        low = made.x[line].double() @ factors.a.double().T * factors.scales
        expected[line] += low @ factors.b.double().T
    assert_close(added(made, [*range(LINES)], {}), expected)


def test_a_slot_that_is_given_away_adds_what_its_new_adapter_adds() -> None:
    """Also where the slots' tensors stay in place, as a recording requires."""
    made = case(torch.bfloat16, ranks=(64, 3))
    slots = low_rank.new_slots(made.y.to(DEVICE), 1, 64)
    tokens = torch.tensor([0, NO_ADAPTER, 0], device=DEVICE)
    found = []
    for factors in (made.adapters[0], made.adapters[1], None):
        low_rank.fill_slot(slots, 0, factors)
        y = made.y[[0, 1, 2]].to(DEVICE)
        low_rank.add(y, made.x[:3].to(DEVICE), slots, tokens)
        alone = made._replace(adapters=[factors], slots=[0, NO_ADAPTER, 0])
        assert torch.equal(y.cpu(), added(alone, [0, 1, 2], {}))
        found.append(y.cpu())
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[2], made.y[:3])


def test_an_output_reads_the_ranks_of_its_part() -> None:
    """Parts begin within a tile of columns, and one has no ranks: the other columns of `low` are ignored."""
    made = case(torch.float32, ranks=(7,))
    factors, spans = made.adapters[0], torch.zeros(OUTPUTS, 2, dtype=torch.int32)
    assert factors is not None
    spans[:70], spans[70:100] = torch.tensor([0, 2]), torch.tensor([2, 7])
    columns = torch.arange(7)
    b = factors.b * ((columns >= spans[:, :1]) & (columns < spans[:, 1:]))
    made = made._replace(adapters=[factors._replace(b=b, spans=spans)], slots=[0] * LINES)
    low = made.x.double() @ factors.a.double().T * factors.scales
    got = added(made, [*range(LINES)], {})
    assert_close(got, made.y.double() + low @ b.double().T)
    assert torch.equal(got[:, 128:], made.y[:, 128:])
    assert low_rank._tiles(spans).tolist() == [[0, 2], [0, 7], [7, 0]]


def test_what_a_slot_takes_is_what_was_said() -> None:
    slots = low_rank.new_slots(torch.zeros(OUTPUTS, INPUTS, dtype=torch.bfloat16, device=DEVICE), 1, 8)
    low_rank.fill_slot(slots, 0, adapter(8, INPUTS, torch.bfloat16))
    taken = sum(one.nbytes for one in slots.kept[0])
    assert taken == low_rank.slot_bytes(INPUTS, OUTPUTS, 8, torch.bfloat16)
    assert low_rank.slot_bytes(INPUTS, OUTPUTS, 0, torch.bfloat16) == 0
