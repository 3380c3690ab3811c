"""The adapters' part of linear layers: y += scale * (x A^T) B^T, each line with the matrices of its own slot, if any.

Two launches: `shrink_kernel` sums x A^T in parts of K; `expand_kernel` adds up the parts, scales them, multiplies by
B^T and adds the result to y, without reading or writing lines that have no adapter. Slots, ranks and addresses are read
on the device, so the host never waits, and a recording serves any adapters.

A program has a tile of lines and processes their slots one after another, each for the whole tile: lines of other slots
are then zeros, and their products are discarded. So lines need no sorting, and batch invariance holds by construction:
all tiles have one height, hence one tensor core instruction; K is cut depending on K alone; a sum over ranks ends with
the adapter's own ranks; and both sums have a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagoda_worker.kernels.ops import LowRank

LINES, RANKS, COLUMNS = 16, 16, 64  # of a tile
PIECE = 128  # of K in one step of a program
SPLITS = 4  # the most parts of K; part of the definition of the result
BUSY = 64  # with fewer tiles, the slots of a tile get programs of their own; changes no bits

_LINES: tl.constexpr = tl.constexpr(LINES)
_RANKS: tl.constexpr = tl.constexpr(RANKS)
_COLUMNS: tl.constexpr = tl.constexpr(COLUMNS)
_PIECE: tl.constexpr = tl.constexpr(PIECE)
_FIELDS: tl.constexpr = tl.constexpr(5)


class LowSlots(NamedTuple):
    """The adapters' slots of one layer [N, K].

    Attributes:
        table: [count, 5] int64, the addresses of `kept` and the rank, which is 0 if nothing is added.
        kept: For each slot A [R, K] and B^T [R, N] in the run dtype, scales [R] float32, and the ranks [first, end)
            that each tile of columns reads, [tiles, 2] int32.
        width: The most ranks of an adapter, rounded up to RANKS.
        dtype: Of the layer.
    """

    table: Tensor
    kept: list[tuple[Tensor, ...]]
    width: int
    dtype: torch.dtype


def new_slots(weight: Tensor, count: int, rank: int) -> LowSlots:
    """Slots on the device of `weight` [N, K]; `rank`: the most ranks of all parts of the layer together."""
    width = triton.cdiv(rank, RANKS) * RANKS
    table = torch.zeros(count, _FIELDS.value, dtype=torch.int64, device=weight.device)
    return LowSlots(table, [()] * count, width, weight.dtype)


def fill_slot(slots: LowSlots, slot: int, factors: LowRank | None) -> None:
    """See Ops.fill_slot."""
    kept: tuple[Tensor, ...] = ()
    entry = [0] * slots.table.shape[1]
    if factors is not None:
        matrices = (one.to(slots.table.device, slots.dtype).contiguous() for one in (factors.a, factors.b.T))
        tiles = _tiles(factors.spans.cpu())
        kept = *matrices, *(one.to(slots.table.device).contiguous() for one in (factors.scales, tiles))
        entry = [*(one.data_ptr() for one in kept), factors.a.shape[0]]
    slots.table[slot] = torch.tensor(entry)
    slots.kept[slot] = kept


def slot_bytes(inputs: int, outputs: int, ranks: int, dtype: torch.dtype) -> int:
    """Bytes of an adapter with `ranks` ranks for all parts of a layer [outputs, inputs] together."""
    return ranks * (dtype.itemsize * (inputs + outputs) + 4) + (8 * triton.cdiv(outputs, COLUMNS) if ranks else 0)


def add(y: Tensor, x: Tensor, slots: LowSlots, token_slots: Tensor) -> None:
    """Add to y [T, N], in place, the part of the adapters in `token_slots` [T] int64 for x [T, K]; both contiguous."""
    (tokens, inputs), outputs = x.shape, y.shape[1]
    if not tokens:
        return
    part = triton.cdiv(inputs, SPLITS * PIECE) * PIECE
    splits = triton.cdiv(inputs, part)
    low = torch.empty((splits, tokens, slots.width), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(tokens, LINES)
    turns = max(1, min(len(slots.kept), LINES, BUSY // tiles))
    shrink_kernel[(tiles * turns, slots.width // RANKS, splits)](
        low, x, token_slots, slots.table, tokens, turns, inputs, slots.width, part
    )
    expand_kernel[(tiles * turns, triton.cdiv(outputs, COLUMNS))](
        y, low, token_slots, slots.table, tokens, turns, outputs, slots.width, splits
    )


def _tiles(spans: Tensor) -> Tensor:
    """spans [N, 2] of outputs -> spans of tiles, [tiles, 2] int32."""
    reads = spans[:, 1] > spans[:, 0]
    most = int(spans.max())
    missing = (0, -len(spans) % COLUMNS)
    first = F.pad(spans[:, 0].masked_fill(~reads, most), missing, value=most).view(-1, COLUMNS).amin(1)
    end = F.pad(spans[:, 1].masked_fill(~reads, 0), missing).view(-1, COLUMNS).amax(1)
    return torch.stack((first, end), 1).int()


@triton.jit
def _tile(token_slots, tokens, turns):
    """The lines of this program's tile, and the slots that it processes, -1 for the others."""
    program = tl.program_id(0)
    line = (program // turns).to(tl.int64) * _LINES + tl.arange(0, _LINES)
    slot = tl.load(token_slots + line, mask=line < tokens, other=-1).to(tl.int32)
    return line, tl.where(slot % turns == program % turns, slot, -1)


@triton.jit
def _field(table, slot, FIELD: tl.constexpr):
    return tl.load(table + slot.to(tl.int64) * _FIELDS + FIELD)


@triton.jit
def _pointer(table, slot, FIELD: tl.constexpr, dtype: tl.constexpr):
    """Tensors are aligned to at least 16 bytes."""
    return tl.multiple_of(_field(table, slot, FIELD).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["tokens", "turns"])
def shrink_kernel(low, x, token_slots, table, tokens, turns, inputs, width, part):
    """One part of K of a tile's x A^T, for RANKS ranks; low is [splits, T, width] float32."""
    dtype: tl.constexpr = x.dtype.element_ty
    line, left = _tile(token_slots, tokens, turns)
    first = tl.program_id(1) * _RANKS
    rank = first + tl.arange(0, _RANKS)
    split = tl.program_id(2)
    end = tl.minimum((split + 1) * part, inputs)
    lows = low + (split * tokens.to(tl.int64) + line[:, None]) * width + rank[None, :]
    slot = tl.max(left, 0)
    while slot >= 0:
        mine = left == slot
        ranks = _field(table, slot, 4)
        if first < ranks:
            a = _pointer(table, slot, 0, dtype)
            total = tl.zeros((_LINES, _RANKS), tl.float32)
            for start in range(split * part, end, _PIECE):
                at = start + tl.arange(0, _PIECE)
                known = at < inputs
                value = tl.load(
                    x + line[:, None] * inputs + at[None, :], mask=mine[:, None] & known[None, :], other=0.0
                )
                places = a + rank[None, :].to(tl.int64) * inputs + at[:, None]
                factor = tl.load(places, mask=(rank < ranks)[None, :] & known[:, None], other=0.0)
                total = tl.dot(value, factor, total, input_precision="ieee")
            tl.store(lows, total, mask=mine[:, None] & (rank < ranks)[None, :])
        left = tl.where(mine, -1, left)
        slot = tl.max(left, 0)


@triton.jit
def _times(value, factor, total):
    """total + value * factor; for bfloat16 factors, float32 values are split in two, which keeps 16 bits of each."""
    if factor.dtype == tl.bfloat16:
        high = value.to(tl.bfloat16)
        total = tl.dot(high, factor, total)
        return tl.dot((value - high.to(tl.float32)).to(tl.bfloat16), factor, total)
    return tl.dot(value, factor.to(tl.float32), total, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "turns"])
def expand_kernel(y, low, token_slots, table, tokens, turns, outputs, width, splits):
    """Add to COLUMNS columns of a tile's lines; `low` is the output of `shrink_kernel`."""
    dtype: tl.constexpr = y.dtype.element_ty
    line, left = _tile(token_slots, tokens, turns)
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    inside = column < outputs
    places = y + line[:, None] * outputs + column[None, :]
    slot = tl.max(left, 0)
    while slot >= 0:
        mine = left == slot
        if _field(table, slot, 4) > 0:
            b, scales = _pointer(table, slot, 1, dtype), _pointer(table, slot, 2, tl.float32)
            span = _pointer(table, slot, 3, tl.int32) + tl.program_id(1) * 2
            first, end = tl.load(span), tl.load(span + 1)
            total = tl.zeros((_LINES, _COLUMNS), tl.float32)
            for start in range(first, end, _RANKS):
                rank = start + tl.arange(0, _RANKS)
                known = rank < end
                lows = low + line[:, None] * width + rank[None, :]
                value = tl.zeros((_LINES, _RANKS), tl.float32)
                for split in range(splits):
                    here = lows + split * tokens.to(tl.int64) * width
                    value += tl.load(here, mask=mine[:, None] & known[None, :], other=0.0)
                value *= tl.load(scales + rank, mask=known, other=0.0)[None, :]
                factors = b + rank[:, None].to(tl.int64) * outputs + column[None, :]
                factor = tl.load(factors, mask=known[:, None] & inside[None, :], other=0.0)
                total = _times(value, factor, total)
            if first < end:
                written = mine[:, None] & inside[None, :]
                before = tl.load(places, mask=written, other=0.0).to(tl.float32)
                tl.store(places, (before + total).to(dtype), mask=written)
        left = tl.where(mine, -1, left)
        slot = tl.max(left, 0)
