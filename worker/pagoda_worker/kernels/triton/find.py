"""Device code of `sampling`: integer weights, and the search for a place in the order of a row's tokens."""

from __future__ import annotations

import triton
import triton.language as tl

_DEPTH: tl.constexpr = tl.constexpr(48.0)  # distance below the top, in temperatures, at which weights have become 0


@triton.jit
def token_mass(z, top, heat, SHIFT: tl.constexpr):
    """exp((z - top) / heat) in units of 2**-SHIFT, int64. `top` and `heat` are float64."""
    return (tl.exp((z.to(tl.float64) - top) / heat) * (1 << SHIFT)).to(tl.int64)


@triton.jit
def sort_key(z):
    """An int32 that orders float32 numerically, treating both zeros alike."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def range_of(ends, row, rows, slices, heat, SLICES: tl.constexpr, BINS: tl.constexpr):
    """(top, bins per unit of logit) of a row, float64, for the part of its range that has mass.

    `ends` [2, rows, slices] float32: the highest and the lowest logit of each slice.
    """
    parts = tl.arange(0, SLICES)
    at, known = row * slices + parts, parts < slices
    top = tl.max(tl.load(ends + at, mask=known, other=float("-inf")), 0).to(tl.float64)
    low = tl.min(tl.load(ends + rows * slices + at, mask=known, other=float("inf")), 0).to(tl.float64)
    span = tl.minimum(top - low, heat * _DEPTH)
    return top, tl.where(span > 0.0, (BINS - 2) / tl.where(span > 0.0, span, 1.0), 0.0)


@triton.jit
def histogram_bin(z, mass, top, steps, BINS: tl.constexpr):
    """The bin of a logit, monotone in the logit because every operation here is."""
    depth = tl.minimum((top - z.to(tl.float64)) * steps, BINS - 2.0)
    return tl.where(mass > 0, depth.to(tl.int32), BINS - 1)


@triton.jit
def _list_bin(
    chosen, z_row, list_row, top, steps, heat, vocab, BINS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the ids of a bin to list_row, ascending; returns (their number, lowest and highest sort key as int64)."""
    lane = tl.arange(0, BLOCK)
    size = chosen * 0
    least, most = size + 2147483647, size - 2147483647
    tl.debug_barrier()  # an earlier find may still be reading the list
    for start in range(0, vocab, BLOCK):
        ids = start + lane
        z = tl.load(z_row + ids, mask=ids < vocab, other=float("-inf"))
        here = histogram_bin(z, token_mass(z, top, heat, SHIFT), top, steps, BINS) == chosen
        here &= ids < vocab
        tl.store(list_row + size + tl.cumsum(here.to(tl.int32), 0) - 1, ids, mask=here)
        size += tl.sum(here.to(tl.int32), 0)
        key = sort_key(z)
        least = tl.minimum(least, tl.min(tl.where(here, key, 2147483647), 0))
        most = tl.maximum(most, tl.max(tl.where(here, key, -2147483647), 0))
    tl.debug_barrier()
    return size, least.to(tl.int64), most.to(tl.int64)


@triton.jit
def find(
    target, z_row, mass_row, count_row, list_row, top, steps, heat, vocab, by_count,
    BINS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the first token in order whose cumulative mass (or count) exceeds `target`, which is below the row's total.

    Returns (sort key of its logit, number of equal tokens before it, mass up to and including it, number of ids in
    list_row); list_row then has the tokens of its bin by ascending id.
    """
    bins = tl.arange(0, BINS)
    masses, counts = tl.load(mass_row + bins), tl.load(count_row + bins).to(tl.int64)
    measured = tl.where(by_count, counts, masses)
    chosen = tl.sum((tl.cumsum(measured, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(bins < chosen, measured, 0), 0)
    mass_before = tl.sum(tl.where(bins < chosen, masses, 0), 0)
    lane = tl.arange(0, BLOCK)
    size, low, high = _list_bin(chosen, z_row, list_row, top, steps, heat, vocab, BINS, SHIFT, BLOCK)
    while low < high:  # find the highest key such that the tokens from it upwards exceed the target
        middle = low + (high - low + 1) // 2
        reached = before
        for start in range(0, size, BLOCK):
            known = start + lane < size
            ids = tl.load(list_row + start + lane, mask=known, other=0)
            z = tl.load(z_row + ids, mask=known, other=float("-inf"))
            one = tl.where(by_count, 1, token_mass(z, top, heat, SHIFT))
            reached += tl.sum(tl.where(known & (sort_key(z) >= middle), one, 0), 0)
        if reached > target:
            low = middle
        else:
            high = middle - 1
    each = before * 0
    for start in range(0, size, BLOCK):
        known = start + lane < size
        ids = tl.load(list_row + start + lane, mask=known, other=0)
        z = tl.load(z_row + ids, mask=known, other=float("-inf"))
        key, mass = sort_key(z), token_mass(z, top, heat, SHIFT)
        above = known & (key > low)
        one = tl.where(by_count, 1, mass)
        before += tl.sum(tl.where(above, one, 0), 0)
        mass_before += tl.sum(tl.where(above, mass, 0), 0)
        each = tl.maximum(each, tl.max(tl.where(known & (key == low), mass, 0), 0))
    ordinal = (target - before) // tl.where(by_count, 1, each)
    return low.to(tl.int32), ordinal, mass_before + (ordinal + 1) * each, size


@triton.jit
def find_id(key, ordinal, size, z_row, list_row, BLOCK: tl.constexpr):
    """The id of the listed token with this sort key and `ordinal` equal tokens before it."""
    lane = tl.arange(0, BLOCK)
    seen = ordinal * 0
    token = size * 0
    for start in range(0, size, BLOCK):
        known = start + lane < size
        ids = tl.load(list_row + start + lane, mask=known, other=0)
        equal = known & (sort_key(tl.load(z_row + ids, mask=known, other=float("-inf"))) == key)
        place = seen + tl.cumsum(equal.to(tl.int64), 0) - 1
        token += tl.sum(tl.where(equal & (place == ordinal), ids, 0), 0)
        seen += tl.sum(equal.to(tl.int64), 0)
    return token
