"""The adapters' matrices in the form that kernels read: see `LowSlot` and `ShrinkOp` in csrc/program.h.

Programs hold the address of a table that never moves; an adapter takes a slot by writing a line of it.
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
    """The slots of one linear layer.

    table: [slots, 5] int64, a `LowSlot` each.
    kept: The tensors whose addresses are in the table.
    width: The number of values per token between the two products.
    order: Reorders the layer's outputs as its panels have them; None if they are in order.
    """

    table: Tensor
    kept: list[tuple[Tensor, ...]]
    width: int
    order: Order | None


def new_slots(count: int, rank: int, order: Order | None) -> Slots:
    """`rank`: the most ranks of all parts of the layer together."""
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
    """Bytes of A and, for each part, of its share of B, padded by a panel in case the part ends within one."""
    padded = [count + PANEL for count in outputs]
    return 2 * sum(rank * (inputs + count) for rank, count in zip(ranks, padded, strict=True))


def _packed(b: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """`groups` and `b` of a LowSlot, from b [N, R] and spans [N, 2]; N is a multiple of the group's outputs."""
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
    """Compute the first product. Returns what Linear needs to add the second: `slots`, `low` and `low_width`."""
    table, _, width, _ = added.slots
    low = tape.buffer(x.shape[0], HEAD + width, torch.float32)
    operation = Shrink(x=x, slots=table, low=low, k=x.shape[1], width=width)
    tape.take(operation, num_tokens=x.shape[0], slots=added.tokens.tensor)
    return table, low, width
