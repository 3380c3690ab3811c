"""`pagoda_worker.sampling.philox` as device code, with the same bits, so that a row can draw without the host."""

from __future__ import annotations

import triton
import triton.language as tl

_LEFT: tl.constexpr = tl.constexpr(0xD2511F53)
_RIGHT: tl.constexpr = tl.constexpr(0xCD9E8D57)
_WEYL_0: tl.constexpr = tl.constexpr(0x9E3779B9)
_WEYL_1: tl.constexpr = tl.constexpr(0xBB67AE85)
_LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four 32-bit words, held in uint64 like the counter and the key."""
    for _ in tl.static_range(10):
        left, right = c0 * _LEFT, c2 * _RIGHT
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _LOW, (left >> 32) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


@triton.jit
def uniform(seed, choice, position):
    """A float64 in [0, 1) with 53 random bits, from a 64-bit seed and two 32-bit numbers, all passed as int64."""
    key = seed.to(tl.uint64, bitcast=True)
    zero = key * 0
    high, low, _, _ = philox4x32(
        choice.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True), zero, zero, key & _LOW, key >> 32
    )
    return (((high << 32) | low) >> 11).to(tl.float64) * 1.1102230246251565e-16
