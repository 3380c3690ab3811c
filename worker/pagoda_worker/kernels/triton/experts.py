"""Mixture of experts: tokens that chose the same expert pass its matrices together; only the device knows the choices.

A *choice* is one rank of one token; there are n = T * k, numbered token by token. They are sorted by expert and cut
into tiles of at most `LINES` choices of one expert. The host does not know how many tiles an expert has, but there are
never more than n // LINES + min(E, n): a launch of that many programs serves any choices, so a step can be recorded,
and surplus programs end at once. Experts that no token chose are not read.

One program sums a choice from the first input to the last, whatever else is in its tile, wherever it is in the tile and
however high the tile is; a token's choices are added in order of rank. So this is batch-invariant, apart from what is
left to the hardware: see `attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_worker.kernels.routing import Beside
from pagoda_worker.kernels.triton.attention import SLACK_BYTES
from pagoda_worker.kernels.triton.plan import Tiles
from pagoda_worker.kernels.triton.pointwise import PIECE, gated

DEPTH = 64  # inputs of one step of a program
BUSY = 32  # tiles are high from this many choices per expert
MANY = 256  # also from this many tokens: most experts then have some, and reading their matrices takes as long
LOWEST = 16
MOST_STAGES = 4
# Tiles whose programs run side by side, because most of them read the same weights.
_ABREAST: tl.constexpr = tl.constexpr(8)


@triton.jit(do_not_specialize=["count"])
def place_kernel(choices, tiles, ids, count, LINES: tl.constexpr, PIECE: tl.constexpr):
    """One program per expert finds its choices among the `count` ids, and writes its tiles.

    An expert preceded by b choices begins at tile b // LINES + min(expert, b): the experts before it, at most min(..)
    of which have choices, cannot need more tiles, so no program has to know the others' counts.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, PIECE)
    before, own = 0, 0
    for begin in range(0, count, PIECE):
        chosen = tl.load(ids + begin + at, mask=begin + at < count, other=1 << 30)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        own += tl.sum((chosen == expert).to(tl.int32), 0)
    end = before + own
    place = before
    for begin in range(0, count, PIECE):
        chosen = tl.load(ids + begin + at, mask=begin + at < count, other=1 << 30)
        mine = (chosen == expert).to(tl.int32)
        tl.store(choices + place + tl.cumsum(mine, 0) - 1, begin + at, mask=mine > 0)
        place += tl.sum(mine, 0)
    first = before
    for tile in range(before // LINES + tl.minimum(expert, before), end // LINES + tl.minimum(expert + 1, end)):
        tl.store(tiles + tile * 3, tl.where(first < end, expert, -1))
        tl.store(tiles + tile * 3 + 1, first)
        tl.store(tiles + tile * 3 + 2, end)
        first += LINES


@triton.jit
def product_kernel(
    out, x, weights, biases, choices, tiles, per_token, depth, width,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of the lines of a tile.

    With an ACTIVATION, the weights are gate stacked on up, lines are read by token and written in tile order; without,
    they are read in tile order and written by choice.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    pieces = tl.cdiv(width, COLUMNS)
    group, within = tl.program_id(0) // (_ABREAST * pieces), tl.program_id(0) % (_ABREAST * pieces)
    abreast = tl.minimum(tl.num_programs(0) // pieces - group * _ABREAST, _ABREAST)
    tile = tiles + (group * _ABREAST + within % abreast) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        lines = tl.load(tile + 1) + tl.arange(0, LINES)
        used = lines < tl.load(tile + 2)
        choice = tl.load(choices + lines, mask=used, other=0)
        source, target = lines, choice
        if GATED:
            source, target = choice // per_token, lines
        columns = within // abreast * COLUMNS + tl.arange(0, COLUMNS)
        here, inside = used[:, None], (columns < width)[None, :]
        inner = tl.arange(0, DEPTH)
        first_row = expert * width
        if GATED:
            first_row = expert * 2 * width
        x_places = x + source.to(tl.int64)[:, None] * depth + inner[None, :]
        places = weights + (first_row + columns)[None, :] * depth + inner[:, None]
        acc = tl.zeros([LINES, COLUMNS], tl.float32)
        up = tl.zeros([LINES, COLUMNS], tl.float32)
        for begin in range(0, depth, DEPTH):
            known, wanted = here, inside
            if not EVEN:
                known, wanted = here & (inner < depth - begin)[None, :], inside & (inner < depth - begin)[:, None]
            value = tl.load(x_places + begin, mask=known, other=0.0)
            acc = tl.dot(value, tl.load(places + begin, mask=wanted, other=0.0), acc, input_precision="ieee")
            if GATED:
                weight = tl.load(places + width * depth + begin, mask=wanted, other=0.0)
                up = tl.dot(value, weight, up, input_precision="ieee")
        if BIAS:
            acc += tl.load(biases + first_row + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if BIAS:
                bias = tl.load(biases + first_row + width + columns, mask=columns < width, other=0.0)
                up += bias.to(tl.float32)[None, :]
            kept = out.dtype.element_ty
            acc = gated(acc.to(kept).to(tl.float32), up.to(kept).to(tl.float32), ACTIVATION)
        places = out + target.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(places, acc.to(out.dtype.element_ty), mask=here & inside)


@triton.jit
def combine_kernel(
    out, products, weights, beside, gate, width,
    CHOSEN: tl.constexpr, BESIDE: tl.constexpr, GATE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A piece of one token; see `routing.combine`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    here = at < width
    first = token * CHOSEN
    total = tl.load(products + first * width + at, mask=here, other=0.0).to(tl.float32) * tl.load(weights + first)
    for rank in range(1, CHOSEN):
        share = tl.load(products + (first + rank) * width + at, mask=here, other=0.0).to(tl.float32)
        total += share * tl.load(weights + first + rank)
    if BESIDE:
        share = tl.load(beside + token * width + at, mask=here, other=0.0).to(tl.float32)
        if GATE:
            share = share / (1.0 + tl.exp(-tl.load(gate + token)))
        total += share
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=here)


class PackedExperts(NamedTuple):
    """Gate and up of all experts [E, 2 I, H], down [E, H, I], and their biases; `favour`: see `routing`."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    favour: Tensor | None


class Placed(NamedTuple):
    """`choices` [n] int32 sorted by expert, and `tiles` [.., 3] int32 of at most `lines` choices.

    A tile is an expert (-1 if the tile is unused), the place of its first choice, and one past its expert's last.
    """

    choices: Tensor
    tiles: Tensor
    lines: int


def place(ids: Tensor, experts: int, lines: int) -> Placed:
    """Sort the choices ids [T, k], T > 0, by expert. The host does not wait."""
    count = ids.numel()
    choices = ids.new_empty(count, dtype=torch.int32)
    tiles = ids.new_empty((count // lines + min(experts, count), 3), dtype=torch.int32)
    place_kernel[(experts,)](choices, tiles, ids.contiguous(), count, LINES=lines, PIECE=PIECE)
    return Placed(choices, tiles, lines)


def lines_for(tokens: int, chosen: int, experts: int, tiles: Tiles, dtype: torch.dtype) -> int:
    """The height of tiles: high ones read a matrix once for more choices, low ones waste fewer lines. Changes no bits.

    float32, which tensor cores do not multiply, would need too many registers in all but the lowest tiles.
    """
    if dtype == torch.float32:
        return LOWEST
    return tiles.high if tokens >= MANY or tokens * chosen >= BUSY * experts else tiles.low


def through_experts(
    x: Tensor,
    chosen: tuple[Tensor, Tensor],
    packed: PackedExperts,
    activation: str,
    beside: Beside | None,
    tiles: Tiles,
) -> Tensor:
    """x [T, H] through the experts `chosen`, the ids and weights [T, k] from `routing.choose` -> [T, H]."""
    (ids, weights), out = chosen, torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return out
    (tokens, per_token), (experts, hidden, width) = ids.shape, packed.down.shape
    placed = place(ids, experts, lines_for(tokens, per_token, experts, tiles, x.dtype))
    middle, products = x.new_empty((tokens * per_token, width)), x.new_empty((tokens * per_token, hidden))
    launch = Launch(placed, per_token, tiles.shared_bytes)
    launch.product(middle, x.contiguous(), packed.gate_up, packed.gate_up_bias, activation)
    launch.product(products, middle, packed.down, packed.down_bias)
    combine(out, products, weights, beside)
    return out


class Launch:
    """The arguments common to both products; `per_token`: k."""

    def __init__(self, placed: Placed, per_token: int, shared_bytes: int) -> None:
        self._placed, self._per_token, self._shared_bytes = placed, per_token, shared_bytes

    def product(self, out: Tensor, x: Tensor, weights: Tensor, biases: Tensor | None, activation: str = "") -> None:
        """x [T, K] times weights [E, 2 N, K], activated -> out [n, N] in tile order.

        Without activation, x [n, K] is in tile order, weights are [E, N, K], and out is in token order.
        """
        (_, width), depth, (choices, tiles, lines) = out.shape, x.shape[1], self._placed
        columns = (64 if lines < 64 else 128) // (2 if activation else 1)
        product_kernel[(len(tiles) * triton.cdiv(width, columns),)](
            out, x, weights, weights if biases is None else biases, choices, tiles, self._per_token, depth, width,
            ACTIVATION=activation, BIAS=biases is not None, EVEN=depth % DEPTH == 0, LINES=lines, COLUMNS=columns,
            DEPTH=DEPTH, **self._options(x.element_size()),
        )  # fmt: skip

    def _options(self, item_bytes: int) -> dict[str, Any]:
        """Warps, and as many pipeline stages as fit in a program's shared memory; not yet tuned on a device."""
        lines = self._placed.lines
        stage = (lines + (64 if lines < 64 else 128)) * DEPTH * item_bytes
        stages = max(1, min(MOST_STAGES, (self._shared_bytes - SLACK_BYTES) // stage))
        return {"num_warps": 8 if lines >= 128 else 4, "num_stages": stages, "enable_fp_fusion": False}


def combine(out: Tensor, products: Tensor, weights: Tensor, beside: Beside | None) -> None:
    """products [T * k, H] by rank and weights [T, k] float32 -> out [T, H], with the bits of `routing.combine` except
    for the gate of `beside`."""
    tokens, width = out.shape
    share = products if beside is None else beside.product.contiguous()
    gate = weights if beside is None or beside.gate is None else beside.gate.contiguous()
    combine_kernel[(tokens, triton.cdiv(width, PIECE))](
        out, products, weights.contiguous(), share, gate, width, CHOSEN=weights.shape[1], BESIDE=beside is not None,
        GATE=beside is not None and beside.gate is not None, PIECE=PIECE, enable_fp_fusion=False,
    )  # fmt: skip
