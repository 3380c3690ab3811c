"""What only encoders ask for, from operations every torch has: any device, one row's bits its own on a CPU.

Elementwise work is cut where a row ends, as in `aten`; everything else here runs per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

GRAIN = 16384  # elements of elementwise work that no two threads share


def embed_at(token_ids: Tensor, table: Tensor, positions: Tensor, places: Tensor) -> Tensor:
    """See `Ops.embed_at`."""
    total = wide(table.index_select(0, token_ids)) + wide(places.index_select(0, positions))
    return total.to(table.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Ops.layer_norm`."""
    seen = wide(x)
    shift = None if bias is None else bias.to(seen.dtype)
    return F.layer_norm(seen, (x.shape[-1],), weight.to(seen.dtype), shift, eps).to(x.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    """act(x) [T, N], computed in float32 at least; on a CPU one piece of whole rows at a time."""
    act = ACTIVATIONS[activation]
    if x.device.type != "cpu" or x.numel() <= GRAIN:
        return act(wide(x)).to(x.dtype)
    return torch.cat([act(wide(piece)).to(x.dtype) for piece in _pieces(x)])


def _pieces(x: Tensor) -> Iterator[Tensor]:
    yield from torch.split(x, max(1, GRAIN // x.shape[-1]))


def wide(x: Tensor) -> Tensor:
    """At least float32; float64 stays, so that tests can ask for more."""
    return x if x.dtype == torch.float64 else x.float()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
