"""Mixture of experts apart from the products: which experts a token goes to, and how their outputs are combined.

An expert's score is its logit, or the logit's sigmoid plus the expert's `favour`. A token goes to the `chosen` experts
with the highest scores, ties to the lowest id; this order gives their ranks. Products are weighted and added in order
of rank, in float32; the MLP that every token passes (`Beside`) is added last, and the sum is rounded once. So a token's
bits depend neither on which other tokens its experts have, nor on the order in which experts compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST_SUM = 1e-20  # added to the divisor of sigmoids


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits are interpreted.

    Attributes:
        renormalised: The softmax is over the chosen experts instead of over all; sigmoids are divided by the sum over
            the chosen experts instead of used as they are.
        scale: Multiplies all weights.
        groups: Experts form this many contiguous groups of equal size; only those in the best `chosen_groups` can be
            chosen. A group's score is the sum of its `group_top` highest scores; ties go to the first group.
        inputs: Weights multiply the experts' inputs instead of their outputs. Back ends do not see this: see
            `models.moe`.
    """

    experts: int
    chosen: int
    renormalised: bool
    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_top: int = 1
    inputs: bool = False


class Packed(NamedTuple):
    """Experts of a back end that packs each one separately: gate and up, and down. `favour`: [E] float32 or None."""

    experts: Sequence[tuple[Any, Any]]
    favour: Tensor | None


class Beside(NamedTuple):
    """The output of an MLP that every token passes: [T, H], times the sigmoid of gate [T, 1] float32 if given."""

    product: Tensor
    gate: Tensor | None


def choose(logits: Tensor, routing: Routing, favour: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> expert ids [T, k] by rank, and their weights [T, k] float32."""
    wide = logits.float()
    own = sigmoid(wide) if routing.sigmoid else wide
    scores = own if favour is None else own + favour
    if routing.chosen_groups < routing.groups:
        scores = _of_best_groups(scores, routing)
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, : routing.chosen]
    weights = _weights(wide, own.gather(-1, ids), ids, routing)
    return ids, weights if routing.scale == 1.0 else weights * routing.scale


def _weights(logits: Tensor, own: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Weights of the chosen experts, whose sigmoids or logits are `own` [T, k]."""
    if routing.sigmoid:
        return own / (_in_order(own) + LEAST_SUM).unsqueeze(-1) if routing.renormalised else own
    return own.softmax(-1) if routing.renormalised else logits.softmax(-1).gather(-1, ids)


def _of_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """scores [T, E], with -inf outside the best groups."""
    grouped = scores.view(*scores.shape[:-1], routing.groups, -1)
    best = _in_order(grouped.sort(dim=-1, descending=True).values[..., : routing.group_top])
    groups = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.chosen_groups]
    others = torch.ones_like(best, dtype=torch.bool).scatter_(-1, groups, False)
    return grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(-2)


def _in_order(x: Tensor) -> Tensor:
    """Sums over the last dimension, which is short, from first to last."""
    first, *others = x.unbind(-1)
    return sum(others, first)


def sigmoid(x: Tensor) -> Tensor:
    """By softmax, which computes every row alike; torch's elementwise functions round differently at the end of a
    thread's share."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def combine(products: Tensor, weights: Tensor, beside: Beside | None) -> Tensor:
    """products [T, k, H] by rank, weights [T, k] -> [T, H] in the dtype of the products."""
    total = products[:, 0].float() * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total.add_(products[:, rank].float() * weights[:, rank : rank + 1])
    if beside is not None:
        share = beside.product.float()
        if beside.gate is not None:
            share = share * sigmoid(beside.gate)
        total.add_(share)
    return total.to(products.dtype)


def routed(
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    packed: Packed,
    run: Callable[[Any, Any, Tensor], Tensor],
    beside: Beside | None,
) -> Tensor:
    """x [T, H] and the router's logits [T, E] -> [T, H]; run(gate and up, down, rows [n, H]) gives their products."""

    def product(expert: int, rows: Tensor) -> Tensor:
        return run(*packed.experts[expert], rows)

    ids, weights = choose(logits, routing, packed.favour)
    return combine(by_expert(x, ids, routing.experts, product), weights, beside)


def by_expert(x: Tensor, ids: Tensor, experts: int, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Call run(expert, rows of x [T, H]) -> products [n, H] for each expert that has rows; returns [T, k, H]."""
    flat = ids.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts).tolist()
    products = x.new_empty(len(flat), x.shape[1])
    for expert, places in enumerate(torch.split(order, counts)):
        if len(places):
            products[places] = run(expert, x[places // ids.shape[1]])
    return products.view(*ids.shape, -1)
