"""Mixture of experts by the kernel library: matrices packed one after the other, and the operations of one layer."""

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
    """The same matrix of all experts. `panels` [E, ..]: of each, as `NativeLinear` has them."""

    panels: Tensor
    n: int
    k: int
    form: Form


class NativeExperts(NamedTuple):
    gate_up: Stack
    down: Stack


def stacked(packed: Iterable[tuple[NativeLinear, NativeLinear]], count: int) -> NativeExperts:
    """Gate and up, and down, of `count` experts, which are let go of one by one.

    Raises:
        BackendError: experts of one layer are in different forms.
    """
    stacks: list[Stack] = []
    for expert, pair in enumerate(packed):
        if not stacks:
            stacks = [
                Stack(pages(count, *one.panels.shape, dtype=one.panels.dtype), one.n, one.k, one.form) for one in pair
            ]
        for stack, one in zip(stacks, pair, strict=True):
            if (one.n, one.k, one.form) != stack[1:]:
                raise BackendError("kernels: native needs the experts of a layer quantised alike")
            stack.panels[expert] = one.panels
    return NativeExperts(*stacks)


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
        raise BackendError(f"kernels: native has up to {MOST_EXPERTS} experts, {MOST_CHOSEN} of them for a token")
    sizes = {"experts": experts, "chosen": chosen}
    ids, weights = (tape.buffer(tokens, chosen, dtype) for dtype in (torch.int32, torch.float32))
    order = tape.buffer(tokens, chosen + 2 * experts + 2, torch.int32)
    rows = tape.buffer(tokens, chosen * packed.gate_up.k, torch.bfloat16)
    middle = tape.buffer(tokens, chosen * packed.down.k, torch.bfloat16)
    products = tape.buffer(tokens, chosen * packed.down.n, torch.bfloat16)

    def through(stack: Stack, source: Tensor, target: Tensor, activation: int) -> Experts:
        return Experts(
            x=source, panels=stack.panels, y=target, order=order, n=stack.n, k=stack.k, activation=activation,
            **sizes, unused=0, form=stack.form,
        )  # fmt: skip

    product, gate = beside or (None, None)
    y = tape.buffer(tokens, packed.down.n, torch.bfloat16)
    for operation in (
        Route(logits=logits, ids=ids, weights=weights, **sizes, renormalised=int(routing.renormalised)),
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
