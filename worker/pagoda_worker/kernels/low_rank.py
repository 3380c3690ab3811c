"""What adapters add to a linear layer: scales * B (A x), for tokens whose row has one, and nothing for the others.

An adapter in use has a *slot*, the same in all layers. A token's slot says which matrices its line passes, so lines of
many adapters and of none share a batch, and none knows of the others: lines without are not touched, those of one slot
pass its two products together, and each is rounded as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagoda_worker.rows.slots import TokenSlots


class LowRank(NamedTuple):
    """What one adapter has for one linear layer [N, K], whose parts' ranks stand behind one another.

    `spans` are which of the ranks an output reads, [first, end): of the others `b` has zeros.
    """

    a: Tensor  # [R, K], as are `b` and the layer itself in the run dtype
    b: Tensor  # [N, R]
    scales: Tensor  # [R] float32
    spans: Tensor  # [N, 2] int32


class Added(NamedTuple):
    """What is to be added in a call: a layer's `slots`, as its back end keeps them, by the slots of the tokens."""

    slots: Any
    tokens: TokenSlots


@dataclass(frozen=True)
class SlotRoom:
    """How many adapters there is room for, and the highest rank that one may have for one matrix."""

    count: int
    rank: int


Product = Callable[[Tensor, Tensor], Tensor]


def add_low_rank(x: Tensor, y: Tensor, added: Added | None, product: Product) -> Tensor:
    """y [T, N], which may be overwritten, with what is added for x [T, K]; computed in float32, rounded once more.

    `product` is x [n, K] by a matrix of `added.slots`, which are LowRank or None.
    """
    for slot, places in added.tokens.groups if added is not None else ():
        factors = added.slots[slot] if added is not None else None
        if factors is None:
            continue
        low = product(_wide(x[places]), factors.a) * factors.scales
        y[places] = (_wide(y[places]) + product(low, factors.b)).to(y.dtype)
    return y


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
