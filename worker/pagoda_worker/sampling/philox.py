"""Philox4x32-10: random numbers as a pure function of (key, counter), so that sampling keeps no state.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The counter of a draw is
(choice, output position, 0, 0) and the key is the request's 64-bit seed, so a token's randomness is the same on every
worker, in every batch and after every replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_11 = np.uint64(11)


def philox4x32(counter: Sequence[ArrayLike], key: Sequence[ArrayLike]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words (held in uint64) for each counter of four words and key of two, elementwise."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, np.uint64) for word in key)
    for _ in range(ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 bits never overflow 64
        c0, c1, c2, c3 = (right >> _32) ^ c1 ^ k0, right & _LOW, (left >> _32) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed: ArrayLike, choice: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits: the top bits of the first two words, the first word leading.

    `seed` has 64 bits, `choice` and `position` 32 bits; all are of one shape or broadcast.
    """
    seeds = np.asarray(seed, np.uint64)
    zero = np.uint64(0)
    high, low, _, _ = philox4x32((choice, position, zero, zero), (seeds & _LOW, seeds >> _32))
    return ((high << _32 | low) >> _11).astype(np.float64) * 2.0**-53
