"""The one order of a row's tokens: descending logit, ties by lowest id. Everything else is a prefix of it.

top_k, top_p and min_p each keep a prefix; a sampled token and a rank are positions in it. A prefix is found with a
threshold that includes all tokens equal to it, then sorted, so how much was examined never shows in the result. All
functions work on one row of finite-or--inf float32 logits on the host, in one thread, and so do not depend on the rest
of the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Weights = NDArray[np.float64]

# A row is searched by the maxima of groups of its tokens, so many that nearly every wanted token is one of them.
MIN_GROUPS, GROUPS_PER_TOKEN = 1024, 8

_SIGN = np.uint32(0x80000000)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def sort(logits: Logits, ids: Ids) -> Ids:
    """`ids` in order. Each becomes a unique integer key (logit bits, id), so every sort gives the same result."""
    bits = (np.float32(0) - logits[ids]).view(np.uint32)  # ascending; 0 - x merges the two zeros
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    keys = ordered.astype(np.uint64) << _32 | ids.astype(np.uint64)
    keys.sort()
    return (keys & _LOW).astype(np.int64)


def at_least(logits: Logits, threshold: float) -> Ids:
    """Every token whose logit reaches `threshold`, in order."""
    return sort(logits, np.flatnonzero(logits >= np.float32(threshold)))


def first(logits: Logits, count: int) -> Ids:
    """The first `count` tokens in order."""
    if count >= len(logits):
        return sort(logits, np.arange(len(logits)))
    size = max(1, len(logits) // max(MIN_GROUPS, GROUPS_PER_TOKEN * count))
    place = len(logits) // size - count
    highest = logits[: len(logits) // size * size].reshape(size, -1).max(axis=0)
    return at_least(logits, np.partition(highest, place)[place])[:count]  # `count` groups have a token that high


def rank(logits: Logits, token: int) -> int:
    """The token's place in the order, from 1."""
    value = logits[token]
    return 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token] == value))


def weights(logits: Logits, top: float, temperature: float = 1.0) -> Weights:
    """Unnormalised probabilities exp((logit - top) / temperature) in float64; `top` is the row's highest logit."""
    exponents = np.subtract(logits, top, dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            exponents /= temperature
    return np.exp(exponents, out=exponents)


def mass(logits: Logits, top: float) -> float:
    """Sum of the weights of a whole row. numpy's pairwise sum depends only on the values and their number."""
    return float(weights(logits, top).sum())
