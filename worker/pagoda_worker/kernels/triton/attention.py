"""Paged attention: keys are folded in splits of 256 at absolute positions, left to right, whichever program does it.

Each split yields its own (m, l, acc): the running maximum, the sum of weights and the weighted values of its keys,
folded tile by tile. Splits are merged left to right with one function. A token's result is then the same whether one
program walks its splits or each split has its own program, and whatever else is in its batch. This relies on three
facts:

- a tile or split of which a token sees nothing has no effect: the state is multiplied by 1 and zeros are added, so a
  program may begin anywhere before a token's first visible key and end anywhere after its last;
- weights are summed as integer multiples of 2**-22, because the order of a float sum depends on how a tile is laid out
  over threads. For the same reason the compiler may not contract multiplications and additions here: `tl.fma` is
  written explicitly where it is wanted;
- a tile that all lines see entirely needs no masks, and has the same bits without them.

The order in which tensor cores sum a product is left to the hardware and may differ between instruction shapes:
`selfcheck` compares the bits, and `Tiles` of equal heights avoid the problem.

A *line* is one query head of one token; the G heads of a KV head share its keys and lie side by side in a tile.
A *work item* [row, start, count, first] is a tile of lines: tokens `first` onwards of the `count` new ones of `row`,
which begin at `start` in the packed batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagoda_worker.kernels.ops import AttentionShape

SPLIT = 256  # keys; part of the definition of the result
TILE = 64  # keys of one step of a program
SLACK_BYTES = 2048  # of shared memory, for the compiler's own use
LOG2E = 1.4426950408889634

_TILE: tl.constexpr = tl.constexpr(TILE)
_PER_SPLIT: tl.constexpr = tl.constexpr(SPLIT // TILE)
_UNIT: tl.constexpr = tl.constexpr(float(1 << 22))
# Adding this to a weight in units rounds it to whole units, which are then the low bits of the float: a conversion
# instruction would take as long as the exponential.
_WHOLE: tl.constexpr = tl.constexpr(float(1 << 23))
_WHOLE_BITS: tl.constexpr = tl.constexpr(0x4B000000)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _merge(m, l, acc, m2, l2, acc2):
    """The left fold. m and l [M], acc [M, D]."""
    top = tl.maximum(m, m2)
    base = tl.where(top == float("-inf"), 0.0, top)
    left, right = tl.exp2(m - base), tl.exp2(m2 - base)
    return top, tl.fma(l, left, l2 * right), tl.fma(acc, left[:, None], acc2 * right[:, None])


@triton.jit
def _fold_tile(
    m, l, acc, q, keys, values, table, kv_head, tile, position, context, scale, cap, window,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Fold a tile of keys into a split's (m, l, acc); scores are in units of log 2. WHOLE: all lines see all of it."""
    dims = tl.arange(0, WIDTH)
    places = tile * _TILE + tl.arange(0, _TILE)
    known = places < context
    if BLOCK_SIZE // _TILE * _TILE == BLOCK_SIZE:  # a tile lies in one block
        block = tl.load(table + tile * _TILE // BLOCK_SIZE).to(tl.int64)
        lines = (block * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
    else:
        blocks = tl.load(table + places // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        lines = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
    key_places, value_places = keys + lines[None, :] * D + dims[:, None], values + lines[:, None] * D + dims[None, :]
    if WHOLE & (WIDTH == D):
        key = tl.load(key_places)
    else:
        key = tl.load(key_places, mask=known[None, :] & (dims[:, None] < D), other=0.0)
    scores = tl.dot(q, key, input_precision="ieee") * scale
    if CAPPED:
        scores = tanh(scores) * cap
    if not WHOLE:
        seen = (places[None, :] <= position[:, None]) & known[None, :]
        if WINDOWED:
            seen &= places[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(m - base)
    units = tl.fma(weights, _UNIT, _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS
    total = tl.sum(units, 1).to(tl.float32) * (1.0 / _UNIT)
    if WHOLE & (WIDTH == D):
        value = tl.load(value_places)
    else:
        value = tl.load(value_places, mask=known[:, None] & (dims[None, :] < D), other=0.0)
    acc = tl.dot(weights.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
    return top, tl.fma(l, keep, total), acc


@triton.jit
def _item(work, contexts, index, heads_per_kv, window, LINES: tl.constexpr, WINDOWED: tl.constexpr):
    """(row, context, packed token of each line or -1, head of each line, its position or -1; the first tile that any
    line sees, the first that not all lines see entirely, and one past the last)."""
    row = tl.load(work + index * 4)
    start, count, first = tl.load(work + index * 4 + 1), tl.load(work + index * 4 + 2), tl.load(work + index * 4 + 3)
    context = tl.load(contexts + row)
    lines = tl.arange(0, LINES)
    capacity = LINES // heads_per_kv
    offset = first + lines // heads_per_kv
    used = (lines < capacity * heads_per_kv) & (offset < count)
    begin = context - count
    last = tl.minimum(begin + first + capacity, context)
    end_tile = (last + _TILE - 1) // _TILE
    first_tile, whole_tiles = 0, (begin + first + 1) // _TILE
    if WINDOWED:
        first_tile = tl.maximum(begin + first - window + 1, 0) // _TILE
        whole_tiles = first_tile
    token, position = tl.where(used, start + offset, -1).to(tl.int64), tl.where(used, begin + offset, -1)
    return row, context, token, lines % heads_per_kv, position, first_tile, whole_tiles, end_tile


@triton.jit
def _finish(m, l, acc, sink):
    """Add the sinks' weight [M] (-inf for none) and normalise."""
    top = tl.maximum(m, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(m - base)
    total = tl.fma(l, keep, tl.exp2(sink - base))
    total = tl.where(total > 0.0, total, 1.0)  # unused lines see nothing
    return acc * keep[:, None] / total[:, None]


@triton.jit(do_not_specialize=["table_stride", "window"])
def walk_kernel(
    out, query, keys, values, tables, contexts, work, sinks,
    token_stride, head_stride, table_stride, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    LINES: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program per (work item, KV head) folds all splits of its lines."""
    kv_head = tl.program_id(1)
    per_kv: tl.constexpr = HEADS // KV_HEADS
    row, context, token, line_head, position, first_tile, whole_tiles, end_tile = _item(
        work, contexts, tl.program_id(0), per_kv, window, LINES, WINDOWED
    )
    head = kv_head * per_kv + line_head
    dims = tl.arange(0, WIDTH)
    here = (token >= 0)[:, None] & (dims < D)[None, :]
    q = tl.load(query + (token * token_stride + head * head_stride)[:, None] + dims[None, :], mask=here, other=0.0)
    table = tables + row.to(tl.int64) * table_stride
    m, part_m = tl.full([LINES], float("-inf"), tl.float32), tl.full([LINES], float("-inf"), tl.float32)
    l, part_l = tl.zeros([LINES], tl.float32), tl.zeros([LINES], tl.float32)
    acc, part = tl.zeros([LINES, WIDTH], tl.float32), tl.zeros([LINES, WIDTH], tl.float32)
    for partly in tl.static_range(2):  # first the tiles that all lines see entirely
        for tile in range(whole_tiles if partly else first_tile, end_tile if partly else whole_tiles):
            if tile // _PER_SPLIT * _PER_SPLIT == tile:
                m, l, acc = _merge(m, l, acc, part_m, part_l, part)
                part_m = tl.full([LINES], float("-inf"), tl.float32)
                part_l = tl.zeros([LINES], tl.float32)
                part = tl.zeros([LINES, WIDTH], tl.float32)
            part_m, part_l, part = _fold_tile(
                part_m, part_l, part, q, keys, values, table, kv_head, tile, position, context, scale, cap, window,
                KV_HEADS, BLOCK_SIZE, D, WIDTH, CAPPED, WINDOWED, partly == 0,
            )  # fmt: skip
    m, l, acc = _merge(m, l, acc, part_m, part_l, part)
    sink = tl.full([LINES], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
    acc = _finish(m, l, acc, sink)
    places = (token * HEADS + head)[:, None] * D + dims[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["table_stride", "window", "used_lines", "num_splits"])
def split_kernel(
    parts, part_sums, query, keys, values, tables, contexts, work,
    token_stride, head_stride, table_stride, scale, cap, window, used_lines, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    LINES: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """For every split of a (work item, KV head), store (m, l) in part_sums [.., 2] and acc in parts [.., D].

    The existing splits, at most num_splits, are divided among the programs of a (work item, KV head).
    """
    index, kv_head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    per_kv: tl.constexpr = HEADS // KV_HEADS
    row, context, token, line_head, position, first_tile, _whole_tiles, end_tile = _item(
        work, contexts, index, per_kv, window, LINES, WINDOWED
    )
    base = first_tile // _PER_SPLIT * _PER_SPLIT
    share = tl.cdiv(tl.cdiv(end_tile - base, _PER_SPLIT), tl.num_programs(2)) * _PER_SPLIT
    first_tile = tl.maximum(first_tile, base + program * share)
    end_tile = tl.minimum(end_tile, base + program * share + share)
    if first_tile < end_tile:
        head = kv_head * per_kv + line_head
        dims = tl.arange(0, WIDTH)
        here = (token >= 0)[:, None] & (dims < D)[None, :]
        q = tl.load(query + (token * token_stride + head * head_stride)[:, None] + dims[None, :], mask=here, other=0.0)
        table = tables + row.to(tl.int64) * table_stride
        places = ((index * KV_HEADS + kv_head).to(tl.int64) * used_lines + tl.arange(0, LINES)) * num_splits
        m, l = tl.full([LINES], float("-inf"), tl.float32), tl.zeros([LINES], tl.float32)
        acc = tl.zeros([LINES, WIDTH], tl.float32)
        for tile in range(first_tile, end_tile):
            m, l, acc = _fold_tile(
                m, l, acc, q, keys, values, table, kv_head, tile, position, context, scale, cap, window,
                KV_HEADS, BLOCK_SIZE, D, WIDTH, CAPPED, WINDOWED, False,
            )  # fmt: skip
            after = tile + 1
            if (after // _PER_SPLIT * _PER_SPLIT == after) | (after == end_tile):
                place = places + tile // _PER_SPLIT
                tl.store(part_sums + place * 2, m, mask=token >= 0)
                tl.store(part_sums + place * 2 + 1, l, mask=token >= 0)
                tl.store(parts + place[:, None] * D + dims[None, :], acc, mask=here)
                m, l = tl.full([LINES], float("-inf"), tl.float32), tl.zeros([LINES], tl.float32)
                acc = tl.zeros([LINES, WIDTH], tl.float32)


@triton.jit(do_not_specialize=["window", "used_lines", "num_splits"])
def fold_kernel(
    out, parts, part_sums, contexts, work, sinks, window, used_lines, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    LINES: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program per (work item, line of a KV head) folds the results of `split_kernel`."""
    index, kv_head, line = tl.program_id(0), tl.program_id(1) // used_lines, tl.program_id(1) % used_lines
    per_kv: tl.constexpr = HEADS // KV_HEADS
    _row, _context, tokens, _heads, _positions, first_tile, _whole_tiles, end_tile = _item(
        work, contexts, index, per_kv, window, LINES, WINDOWED
    )
    token = tl.max(tl.where(tl.arange(0, LINES) == line, tokens, -1), 0)
    if token >= 0:
        head = kv_head * per_kv + line % per_kv
        dims = tl.arange(0, WIDTH)[None, :]
        one = tl.arange(0, 1)
        first = ((index * KV_HEADS + kv_head).to(tl.int64) * used_lines + line) * num_splits
        m, l = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
        acc = tl.zeros([1, WIDTH], tl.float32)
        for split in tl.range(first_tile // _PER_SPLIT, (end_tile + _PER_SPLIT - 1) // _PER_SPLIT, num_stages=4):
            place = first + split
            part = tl.load(parts + place * D + dims, mask=dims < D, other=0.0)
            part_m, part_l = tl.load(part_sums + place * 2 + one), tl.load(part_sums + place * 2 + 1 + one)
            m, l, acc = _merge(m, l, acc, part_m, part_l, part)
        sink = tl.full([1], float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head + one) * 1.4426950408889634
        acc = _finish(m, l, acc, sink)
        tl.store(out + (token * HEADS + head) * D + dims, acc.to(out.dtype.element_ty), mask=dims < D)


class Launch:
    """The arguments common to the launches of one layer's attention."""

    def __init__(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: tuple[torch.Tensor, torch.Tensor],
        shape: AttentionShape,
        sinks: torch.Tensor | None,
        shared_bytes: int,
    ) -> None:
        """query [T, Hq, D], whose last stride should be 1 (else it is copied); out [T, Hq D]; cache: keys and values
        [num_blocks, Hkv, block_size, D]; rows: block tables [B, max_blocks] and context lengths [B], int32."""
        self.query = query if query.stride(-1) == 1 else query.contiguous()
        self.out, self.cache, self.rows, self.shape = out, cache, rows, shape
        self.sinks = None if sinks is None else sinks.float().contiguous()
        width = triton.next_power_of_2(shape.head_dim)
        self._layout = {"HEADS": shape.num_heads, "KV_HEADS": shape.num_kv_heads, "D": shape.head_dim, "WIDTH": width}
        self._masks = {"CAPPED": shape.softcap is not None, "WINDOWED": shape.window is not None}
        self._block_size = cache[0].shape[2]
        self._shared_bytes = shared_bytes

    def walk(self, work: torch.Tensor, lines: int) -> None:
        """work [n, 4] int32, tiles of `lines` lines."""
        grid = (len(work), self.shape.num_kv_heads)
        walk_kernel[grid](
            self.out, self.query, *self.cache, *self.rows, work, self._sinks(), *self._strides(), *self._scalars(),
            **self._layout, **self._masks, BLOCK_SIZE=self._block_size, LINES=lines, SINKS=self.sinks is not None,
            **self._options(lines),
        )  # fmt: skip

    def split(self, work: torch.Tensor, lines: int, used_lines: int, num_splits: int, num_programs: int) -> None:
        """The same bits as `walk`.

        `used_lines`: the most lines used by any item; `num_splits`: of the longest possible context; `num_programs`:
        programs that share the splits of one item and KV head.
        """
        shape, (tables, contexts) = self.shape, self.rows
        places = len(work) * shape.num_kv_heads * used_lines * num_splits
        parts = self.query.new_empty((places, shape.head_dim), dtype=torch.float32)
        sums = self.query.new_empty((places, 2), dtype=torch.float32)
        split_kernel[(len(work), shape.num_kv_heads, num_programs)](
            parts, sums, self.query, *self.cache, tables, contexts, work, *self._strides(), *self._scalars(),
            used_lines, num_splits, **self._layout, **self._masks, BLOCK_SIZE=self._block_size, LINES=lines,
            **self._options(lines),
        )  # fmt: skip
        fold_kernel[(len(work), shape.num_kv_heads * used_lines)](
            self.out, parts, sums, contexts, work, self._sinks(), shape.window or 0, used_lines, num_splits,
            **self._layout, LINES=lines, WINDOWED=shape.window is not None, SINKS=self.sinks is not None,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def _sinks(self) -> torch.Tensor:
        return self.query if self.sinks is None else self.sinks

    def _strides(self) -> tuple[int, int, int]:
        return self.query.stride(0), self.query.stride(1), self.rows[0].stride(0)

    def _scalars(self) -> tuple[float, float, int]:
        """The factor of the product, the factor after tanh, and the window."""
        shape = self.shape
        if shape.softcap is None:
            return shape.scale * LOG2E, 0.0, shape.window or 0
        return shape.scale / shape.softcap, shape.softcap * LOG2E, shape.window or 0

    def _options(self, lines: int) -> dict[str, Any]:
        """Warps and pipeline stages; compiled for sm_90 with hardly any spills, not yet tuned on a device."""
        dim, item_bytes = self.shape.head_dim, self.query.element_size()
        many = lines >= 128 or (lines >= 64 and dim > 128)
        stages = stages_for(lines, triton.next_power_of_2(dim), item_bytes, self._shared_bytes)
        return {"num_warps": 8 if many else 4, "num_stages": stages, "enable_fp_fusion": False}


def stages_for(lines: int, width: int, item_bytes: int, shared_bytes: int) -> int:
    """The pipeline stages for tiles of `lines` lines that fit in `shared_bytes` of shared memory; 1 if none fits.

    The pipeline counts the read of a tile's block id as stages of its own: five stages keep two tiles of keys and two
    of values in flight, two to four stages one of each. One stage holds either the keys or the values.
    """
    part = TILE * width * item_bytes
    queries = lines * width * item_bytes * (3 if lines < 64 else 1)  # low tiles also store their results through it
    weights = lines * TILE * item_bytes
    line_bytes = width * item_bytes
    liked = 5 if lines < 64 and line_bytes <= 256 else 4 if line_bytes <= 512 else 2
    parts = {5: 4, 4: 2, 2: 2}
    fits = (
        n for n, held in parts.items() if n <= liked and held * part + queries + weights + SLACK_BYTES <= shared_bytes
    )
    return next(fits, 1)
