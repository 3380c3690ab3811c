"""Mixture of experts with the kernel library: matrices packed one after the other, and the operations of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pagoda_worker.kernels.cpu.library import pages
from pagoda_worker.kernels.cpu.operations import Combine, Experts, Form, Gather, NativeLinear, Route, Sort, Tape
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.kernels.routing import Beside, Routing

MOST_EXPERTS, MOST_CHOSEN = 1024, 64  # see csrc/experts.h


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


def stacked(packed: Iterable[tuple[NativeLinear, NativeLinear]], count: int, favour: Tensor | None) -> NativeExperts:
    """Stack gate and up, and down, of `count` experts, releasing each expert once it is copied.

    Raises:
        BackendError: the experts of a layer are in different forms.
    """
    stacks: list[Stack] = []
    for expert, pair in enumerate(packed):
        if not stacks:
            stacks = [_room(count, one) for one in pair]
        for stack, one in zip(stacks, pair, strict=True):
            if (one.n, one.k, one.form) != (stack.n, stack.k, stack.form):
                raise BackendError("kernels: native needs all experts of a layer quantised alike")
            stack.panels[expert] = one.panels
            if stack.bias is not None and one.bias is not None:
                stack.bias[expert] = one.bias
    gate_up, down = stacks
    return NativeExperts(gate_up, down, favour)


def _room(count: int, one: NativeLinear) -> Stack:
    bias = None if one.bias is None else one.bias.new_empty(count, len(one.bias))
    return Stack(pages(count, *one.panels.shape, dtype=one.panels.dtype), bias, one.n, one.k, one.form)


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
