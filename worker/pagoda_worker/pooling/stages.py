"""Stages from hidden states to a vector, one row at a time in float32, so that a row's bits depend on that row alone.

Products are sums of elementwise products instead of calls of a matrix library, whose order of summation may depend on
its threads. There are only a few vectors per text to multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Stage = Callable[[Floats], Floats]
"""vectors [n, K] -> [n, N]"""


def cls(states: Floats) -> Floats:
    """states [T, H] -> [H], like all ways to pool."""
    found: Floats = states[0]
    return found


def last(states: Floats) -> Floats:
    found: Floats = states[-1]
    return found


def mean(states: Floats) -> Floats:
    return _sum(states) / np.float32(len(states))


def mean_sqrt_len(states: Floats) -> Floats:
    return _sum(states) / np.float32(math.sqrt(len(states)))


def weighted_mean(states: Floats) -> Floats:
    """Weighted by position, from 1 (arXiv 2202.08904)."""
    weights = np.arange(1, len(states) + 1, dtype=np.float32)
    found: Floats = _sum(states * weights[:, None]) / weights.sum()
    return found


def largest(states: Floats) -> Floats:
    found: Floats = states.max(0)
    return found


def _sum(states: Floats) -> Floats:
    """In the order of the tokens."""
    total: Floats = np.add.reduce(states, axis=0)
    return total


WAYS: Mapping[str, Callable[[Floats], Floats]] = {
    "cls": cls, "last": last, "mean": mean, "mean_sqrt_len": mean_sqrt_len, "weighted_mean": weighted_mean,
    "max": largest,
}  # fmt: skip


def _torch(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Floats], Floats]:
    return lambda x: act(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def softmax(x: Floats) -> Floats:
    raised = np.exp(x - x.max(-1, keepdims=True))
    found: Floats = raised / raised.sum(-1, keepdims=True)
    return found


ACTIVATIONS: Mapping[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x, "tanh": np.tanh, "relu": lambda x: np.maximum(x, np.float32(0)), "gelu": _torch(F.gelu),
    "gelu_tanh": _torch(lambda x: F.gelu(x, approximate="tanh")), "silu": _torch(F.silu),
    "sigmoid": _torch(torch.sigmoid), "softmax": softmax,
}  # fmt: skip


@dataclass(frozen=True)
class Dense:
    """act(x W^T + bias), weight [N, K]."""

    weight: Floats
    bias: Floats | None = None
    activation: str = "identity"

    def __call__(self, vectors: Floats) -> Floats:
        found = np.stack([np.add.reduce(self.weight * one, axis=1) for one in vectors])
        return ACTIVATIONS[self.activation](found if self.bias is None else found + self.bias)


@dataclass(frozen=True)
class LayerNorm:
    weight: Floats
    bias: Floats | None
    eps: float

    def __call__(self, vectors: Floats) -> Floats:
        centred = vectors - vectors.mean(-1, keepdims=True)
        spread = np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(self.eps))
        found: Floats = (centred / spread * self.weight).astype(np.float32)
        return found if self.bias is None else found + self.bias


def max_sim(query: Floats, document: Floats) -> Floats:
    """[Q, N] and [D, N] -> [1]: each query vector's similarity to its closest document vector, summed in order."""
    best = [np.add.reduce(document * one, axis=1).max(initial=-1.0) for one in query]
    return np.array([np.add.reduce(np.array(best, np.float32))], np.float32)


def normalized(vectors: Floats) -> Floats:
    """Scaled to length 1; zeros stay."""
    lengths = np.sqrt(np.add.reduce(np.square(vectors), axis=-1, keepdims=True))
    found: Floats = (vectors / np.maximum(lengths, np.float32(1e-12))).astype(np.float32)
    return found
