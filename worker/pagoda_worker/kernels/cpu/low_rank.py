"""What adapters add, as the kernels read it: csrc/program.h says how, in `LowSlot` and `ShrinkOp`.

Programs have the address of a table that stays; an adapter takes a slot by a line in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_worker.kernels.cpu.library import PANEL
from pagoda_worker.kernels.cpu.operations import Shrink, Tape
from pagoda_worker.kernels.ops import Added, LowRank

LANES = 16
HEAD = 16  # LOW_HEAD in csrc/program.h
Order = Callable[[Tensor], Tensor]


class Slots(NamedTuple):
    """Of one linear layer.

    table: [slots, 5] int64, a `LowSlot` each.
    kept: What its addresses are of.
    width: Of the numbers that a token has between the two products.
    order: How the layer's outputs stand in its panels, if otherwise than they are.
    """

    table: Tensor
    kept: list[tuple[Tensor, ...]]
    width: int
    order: Order | None


def new_slots(count: int, rank: int, order: Order | None) -> Slots:
    """`rank`: most of all parts of the layer together."""
    return Slots(torch.zeros(count, 5, dtype=torch.int64), [()] * count, -(-rank // LANES) * LANES, order)


def fill_slot(slots: Slots, slot: int, factors: LowRank | None) -> None:
    if factors is None:
        slots.table[slot] = 0
        slots.kept[slot] = ()
        return
    b, spans = factors.b.bfloat16(), factors.spans
    if slots.order is not None:
        b, spans = slots.order(b), slots.order(spans)
    missing = -len(b) % PANEL
    groups, packed = _packed(F.pad(b, (0, 0, 0, missing)), F.pad(spans, (0, 0, 0, missing)))
    kept = factors.a.bfloat16().contiguous(), packed, groups, factors.scales.contiguous()
    slots.table[slot] = torch.tensor([*(one.data_ptr() for one in kept), factors.a.shape[0]])
    slots.kept[slot] = kept


def slot_bytes(inputs: int, outputs: Sequence[int], ranks: Sequence[int]) -> int:
    """Of A and, for each part, of what it reads of B; of a part that ends within a panel, of a panel."""
    padded = [count + PANEL for count in outputs]
    return 2 * sum(rank * (inputs + count) for rank, count in zip(ranks, padded, strict=True))


def _packed(b: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """`groups` and `b` of a LowSlot. b [N, R] and spans [N, 2]; N is a multiple of the outputs of a group."""
    reads = spans[:, 1] > spans[:, 0]
    first = spans[:, 0].masked_fill(~reads, b.shape[1]).view(-1, LANES).amin(1)
    counts = (spans[:, 1].masked_fill(~reads, 0).view(-1, LANES).amax(1) - first).clamp(min=0)
    starts = counts.cumsum(0) - counts
    parts = [
        rows[:, start : start + count].t().reshape(-1)
        for rows, start, count in zip(b.view(-1, LANES, b.shape[1]), first.tolist(), counts.tolist(), strict=True)
    ]
    return torch.stack((first, counts, starts), 1).int().contiguous(), torch.cat(parts).contiguous()


def shrink(tape: Tape, x: Tensor, added: Added) -> tuple[Tensor, Tensor, int]:
    """The first product; what the layer itself takes to add the second: `slots`, `low` and `low_width` of a Linear."""
    table, _, width, _ = added.slots
    low = tape.buffer(x.shape[0], HEAD + width, torch.float32)
    operation = Shrink(x=x, slots=table, low=low, k=x.shape[1], width=width)
    tape.take(operation, num_tokens=x.shape[0], slots=added.tokens.tensor)
    return table, low, width
