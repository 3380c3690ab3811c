"""Mixture of experts around the products: which experts a token goes to, and how what they say is added.

A token goes to the `chosen` experts with the highest logits, ties to the lowest id; they are its ranks. Products are
weighted and added in the order of ranks, in float32, what every token passes (`Beside`) last, and the sum is rounded
once. So a token's bits depend neither on which others its experts have, nor on the order in which experts compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """`renormalised`: the weights of the chosen are a softmax over these; else over all experts."""

    experts: int
    chosen: int
    renormalised: bool


class Beside(NamedTuple):
    """What an MLP that every token passes adds: [T, H], times the sigmoid of gate [T, 1] float32 if there is one."""

    product: Tensor
    gate: Tensor | None


def choose(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> expert ids [T, k] by rank, and their weights [T, k] float32."""
    wide = logits.float()
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, : routing.chosen]
    if routing.renormalised:
        return ids, wide.gather(-1, ids).softmax(-1)
    return ids, wide.softmax(-1).gather(-1, ids)


def combine(products: Tensor, weights: Tensor, beside: Beside | None) -> Tensor:
    """products [T, k, H] by rank, weights [T, k] -> [T, H] in the dtype of the products."""
    total = products[:, 0].float() * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total.add_(products[:, rank].float() * weights[:, rank : rank + 1])
    if beside is not None:
        share = beside.product.float()
        if beside.gate is not None:  # a sigmoid, by what computes every row alike
            share = share * torch.cat((beside.gate, torch.zeros_like(beside.gate)), 1).softmax(-1)[:, :1]
        total.add_(share)
    return total.to(products.dtype)


def routed(
    x: Tensor, logits: Tensor, routing: Routing, run: Callable[[int, Tensor], Tensor], beside: Beside | None
) -> Tensor:
    """x [T, H] and the router's logits [T, E] -> [T, H]; `run` as in `by_expert`."""
    ids, weights = choose(logits, routing)
    return combine(by_expert(x, ids, routing.experts, run), weights, beside)


def by_expert(x: Tensor, ids: Tensor, experts: int, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """run(expert, rows of x [T, H]) -> their products [n, H], for each expert that has rows; together [T, k, H]."""
    flat = ids.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts).tolist()
    products = x.new_empty(len(flat), x.shape[1])
    for expert, places in enumerate(torch.split(order, counts)):
        if len(places):
            products[places] = run(expert, x[places // ids.shape[1]])
    return products.view(*ids.shape, -1)
