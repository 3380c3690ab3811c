"""Mixture of experts with the kernel library: matrices packed one after the other, and the operations of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagoda_worker.kernels.cpu.library import pages
from pagoda_worker.kernels.cpu.operations import Combine, Experts, Form, Gather, NativeLinear, Route, Sort, Tape
from pagoda_worker.kernels.ops import BackendError, Expert
from pagoda_worker.kernels.routing import Beside, Routing

MOST_EXPERTS, MOST_CHOSEN = 1024, 64  # see csrc/experts.h
UNLIKE = "kernels: native needs all experts of a layer quantised alike"


class Stack(NamedTuple):
    """One matrix of each expert. `panels` [E, ..] and `bias` [E, ..]: those of each, as in `NativeLinear`."""

    panels: Tensor
    bias: Tensor | None
    n: int
    k: int
    form: Form


class NativeExperts(NamedTuple):
    gate_up: Stack
    down: Stack
    favour: Tensor | None


class StackPages:
    """`pages` for the panels of `count` matrices, one after the other in `panels`: packed there, they need no copying,
    and no memory is touched but what is kept."""

    panels: Tensor

    def __init__(self, count: int) -> None:
        self._count, self._used = count, 0

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Raises BackendError if the first was different."""
        if not self._used:
            self.panels = pages(self._count, *shape, dtype=dtype)
        place = self.panels[self._used]
        if (place.shape, place.dtype) != (shape, dtype):
            raise BackendError(UNLIKE)
        self._used += 1
        return place

    def stack(self, packed: Sequence[NativeLinear]) -> Stack:
        """The matrices whose panels are here. Raises BackendError if they are in different forms."""
        first = packed[0]
        if any((one.n, one.k, one.form) != (first.n, first.k, first.form) for one in packed):
            raise BackendError(UNLIKE)
        biases = [one.bias for one in packed if one.bias is not None]
        return Stack(self.panels, torch.stack(biases) if biases else None, first.n, first.k, first.form)


def stacked(
    weights: Iterable[Expert],
    count: int,
    favour: Tensor | None,
    pack_gated: Callable[..., NativeLinear],
    pack_linear: Callable[..., NativeLinear],
) -> NativeExperts:
    """The matrices of `count` experts, each packed where it stays; an expert's weights are read when it is its turn."""
    gate_up, down = StackPages(count), StackPages(count)
    pairs = [
        (pack_gated(one.gate_up, one.gate_up_bias, new=gate_up), pack_linear(one.down, one.down_bias, new=down))
        for one in weights
    ]
    return NativeExperts(gate_up.stack([one for one, _ in pairs]), down.stack([one for _, one in pairs]), favour)


def run(  # noqa: PLR0913 - what Ops.moe is given
    tape: Tape,
    x: Tensor,
    logits: Tensor,
    packed: NativeExperts,
    routing: Routing,
    activation: int,
    beside: Beside | None,
) -> Tensor:
    """See `Ops.moe`; `activation` as in LinearOp."""
    tokens, experts, chosen = len(x), routing.experts, routing.chosen
    if experts > MOST_EXPERTS or chosen > MOST_CHOSEN:
        raise BackendError(f"kernels: native supports up to {MOST_EXPERTS} experts, {MOST_CHOSEN} of them per token")
    sizes = {"experts": experts, "chosen": chosen}
    ids, weights = (tape.buffer(tokens, chosen, dtype) for dtype in (torch.int32, torch.float32))
    order = tape.buffer(tokens, chosen + 2 * experts + 2, torch.int32)
    rows = tape.buffer(tokens, chosen * packed.gate_up.k, torch.bfloat16)
    middle = tape.buffer(tokens, chosen * packed.down.k, torch.bfloat16)
    products = tape.buffer(tokens, chosen * packed.down.n, torch.bfloat16)

    def through(stack: Stack, source: Tensor, target: Tensor, activation: int) -> Experts:
        return Experts(
            x=source, panels=stack.panels, y=target, order=order, bias=stack.bias, n=stack.n, k=stack.k,
            activation=activation, **sizes, unused=0, form=stack.form,
        )  # fmt: skip

    product, gate = beside or (None, None)
    y = tape.buffer(tokens, packed.down.n, torch.bfloat16)
    for operation in (
        _route(routing, logits, packed.favour, ids, weights),
        Sort(ids=ids, order=order, **sizes),
        Gather(x=x, order=order, y=rows, dim=x.shape[1], **sizes),
        through(packed.gate_up, rows, middle, activation),
        through(packed.down, middle, products, 0),
        Combine(
            products=products, order=order, weights=weights, beside=product, gate=gate, y=y, dim=y.shape[1], **sizes
        ),
    ):
        tape.take(operation, num_tokens=tokens)
    return y


def _route(routing: Routing, logits: Tensor, favour: Tensor | None, ids: Tensor, weights: Tensor) -> Route:
    return Route(
        logits=logits, ids=ids, weights=weights, favour=favour, experts=routing.experts, chosen=routing.chosen,
        renormalised=int(routing.renormalised), sigmoid=int(routing.sigmoid), groups=routing.groups,
        chosen_groups=routing.chosen_groups, group_top=routing.group_top, scale=routing.scale,
    )  # fmt: skip
