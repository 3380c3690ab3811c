"""Attention over a paged cache from dense pieces: gather a row's blocks, then one fused call per group of rows.

Rows with one new token are grouped by padded length and run as one call [rows, Hkv, G, D], which reads each KV head
once for its G query heads. A row with more new tokens runs in slices of QUERY_SLICE tokens, [Hkv, G, tokens, D].

torch's fused CPU attention walks the keys in tiles of 512 and merges them left to right. Its bits do not depend on the
neighbours or on how the prompt is cut if two conditions hold, which the padding here ensures (found by experiment,
checked by the tests): the number of query lines is a multiple of 4, and the last tile has 64, 128 or 512 keys, because
the matrix library sums other lengths in other orders. Keys start at a multiple of 512, also under a sliding window.
Padding is masked and multiplies by exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_worker.kernels.kv_cache import KVCache
from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.kernels.reference import first_block
from pagoda_worker.kernels.routing import sigmoid
from pagoda_worker.rows.batch import Batch

QUERY_SLICE = 256
LINES = 4  # query lines come in multiples of this
TILE = 512
SMALL_TILES = (64, 128)
GATHERED_BYTES = 4 * 2**20  # keys and values of one call's rows: what the CPU's caches keep between write and read
SUM_TILE = 128  # keys per product with V where softmax is not fused


def padded_keys(length: int) -> int:
    """The number of keys to present for a row of `length` tokens."""
    for tile in SMALL_TILES:
        if length <= tile:
            return tile
    return -(-length // TILE) * TILE


def first_key(position: int, window: int | None) -> int:
    """The first key presented to a query at `position`: the start of its window, rounded down to a tile."""
    return 0 if window is None else max(0, position - window + 1) // TILE * TILE


class Reach(NamedTuple):
    """How far tokens see; see `AttentionShape`."""

    window: int | None
    causal: bool

    def end(self, end: int, length: int) -> int:
        """One past the last key seen by tokens before `end`, in a row of `length` tokens."""
        if self.causal:
            return end
        return length if self.window is None else min(length, end + self.window - 1)


@dataclass(frozen=True)
class Slice:
    """Query lines that see keys [first, last), with an additive mask [rows or 1, 1, lines or 1, last - first]."""

    tokens: slice | Tensor | None  # which of the batch's tokens; None: all, in order
    first: int
    last: int
    mask: Tensor
    places: Tensor | None = None  # [1, 1, lines, 1]: which token of its row each line is; None for rows of one


@dataclass(frozen=True)
class Group:
    """Rows whose keys are gathered by one indexed read, starting at key `first`, a block boundary."""

    num_rows: int
    blocks: Tensor  # [num_rows * blocks per row] int32
    first: int
    slices: list[Slice]


@dataclass
class Plan:
    """The work of a step: one list of groups per reach, made when the first layer with that reach asks for it. All
    tokens of a non-causal row are new."""

    batch: Batch
    kv: KVCache
    decodes: list[list[int]]  # rows with one new token, by padded length
    prefills: list[int]
    groups: dict[Reach, list[Group]] = field(default_factory=dict)

    def of(self, reach: Reach) -> list[Group]:
        if reach not in self.groups:
            decodes = [self._decode_group(rows, reach.window) for rows in self.decodes]
            self.groups[reach] = decodes + [self._prefill_group(row, reach) for row in self.prefills]
        return self.groups[reach]

    def _decode_group(self, rows: list[int], window: int | None) -> Group:
        lens = [self.batch.context_lens[row] for row in rows]
        first, last = first_key(min(lens) - 1, window), padded_keys(max(lens))
        position = torch.tensor(lens, device=self.kv.layers[0].device)[:, None, None, None] - 1
        mask = self._mask(position, first, last, window)
        tokens = None
        if len(rows) < self.batch.num_tokens:
            tokens = torch.tensor([self.batch.query_starts[row] for row in rows], device=mask.device)
        return self._group(rows, [Slice(tokens, first, last, mask)], window)

    def _prefill_group(self, row: int, reach: Reach) -> Group:
        end, count, start = self.batch.context_lens[row], self.batch.query_lens[row], self.batch.query_starts[row]
        slices = []
        for offset in range(0, count, QUERY_SLICE):
            length = min(QUERY_SLICE, count - offset)
            low = end - count + offset
            first, last = first_key(low, reach.window), padded_keys(reach.end(low + length, end))
            lines = torch.arange(-(-length // LINES) * LINES, device=self.kv.layers[0].device)
            position = (low + lines.clamp_(max=length - 1))[None, None, :, None]
            tokens = slice(start + offset, start + offset + length)
            mask = self._mask(position, first, last, reach.window)
            if not reach.causal:
                mask = self._two_sided(position, first, last, end, reach.window)
            slices.append(Slice(tokens, first, last, mask, position))
        return self._group([row], slices, reach.window)

    def _group(self, rows: list[int], slices: list[Slice], window: int | None) -> Group:
        first, last = slices[0].first, slices[-1].last
        begin = first // self.kv.block_size * self.kv.block_size
        return Group(len(rows), self._blocks(rows, first, last, window), begin, slices)

    def _mask(self, position: Tensor, first: int, last: int, window: int | None) -> Tensor:
        keys = torch.arange(first, last, device=position.device)
        hidden = keys > position
        if window is not None:
            hidden = hidden.logical_or_(keys <= position - window)
        mask = torch.zeros(hidden.shape, dtype=self.kv.shape.dtype, device=position.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _two_sided(self, position: Tensor, first: int, last: int, length: int, window: int | None) -> Tensor:
        keys = torch.arange(first, last, device=position.device).expand(1, 1, position.shape[2], -1)
        hidden = keys >= length
        if window is not None:
            hidden = hidden.logical_or((keys - position).abs() >= window)
        mask = torch.zeros(hidden.shape, dtype=self.kv.shape.dtype, device=position.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _blocks(self, rows: list[int], first: int, last: int, window: int | None) -> Tensor:
        """Block ids that cover keys [first, last), with the empty block before a row's window and beyond its tokens."""
        size, table = self.kv.block_size, self.batch.block_tables
        begin, end = first // size, -(-last // size)
        blocks = table.new_full((len(rows), end - begin), self.kv.empty_block)
        for i, row in enumerate(rows):
            used = min(end, -(-self.batch.context_lens[row] // size))
            seen = max(begin, first_block(self.batch, row, size, window))
            blocks[i, seen - begin : used - begin] = table[row, seen:used]
        return blocks.flatten()


def make_plan(batch: Batch, kv: KVCache) -> Plan:
    """Sort rows into decode groups of equal padded length and single prefill rows."""
    decodes: dict[int, list[int]] = {}
    prefills = []
    for row, count in enumerate(batch.query_lens):
        if count == 1:
            decodes.setdefault(padded_keys(batch.context_lens[row]), []).append(row)
        else:
            prefills.append(row)
    groups = []
    token_bytes = kv.shape.planes * kv.shape.num_kv_heads * kv.shape.head_dim * kv.shape.dtype.itemsize  # as gathered
    for keys, rows in decodes.items():
        most = max(1, GATHERED_BYTES // (keys * token_bytes))
        groups += [rows[start : start + most] for start in range(0, len(rows), most)]
    return Plan(batch, kv, groups, prefills)


class PagedAttention:
    """One layer's attention; see Ops.attend for the arithmetic."""

    def __init__(self, shape: AttentionShape, sinks: Tensor | None, bias: Tensor | None = None) -> None:
        self.shape = shape
        self.sinks = sinks
        self.bias = bias

    def attend(self, query: Tensor, layer: int, plan: Plan) -> Tensor:
        """query [T, Hq, D] -> [T, Hq * D]."""
        out: Tensor | None = None
        for tokens, part in self._parts(query, layer, plan):
            if tokens is None:
                return part
            if out is None:
                out = query.new_empty(query.shape[0], part.shape[1])
            if isinstance(tokens, slice):
                out[tokens] = part
            else:
                out.index_copy_(0, tokens, part)
        return query.new_empty(0, self.shape.num_heads * self.shape.head_dim) if out is None else out

    def _parts(self, query: Tensor, layer: int, plan: Plan) -> Iterator[tuple[slice | Tensor | None, Tensor]]:
        shape = self.shape
        for group in plan.of(Reach(shape.window, shape.causal)):
            gathered = plan.kv.gather(layer, group.blocks)
            keys = gathered.view(group.num_rows, -1, *gathered.shape[2:])
            for part in group.slices:
                seen = keys[:, part.first - group.first : part.last - group.first]
                if isinstance(part.tokens, slice):
                    yield part.tokens, self._prefill(query[part.tokens], seen, self._biased(part))
                else:
                    own = query if part.tokens is None else query.index_select(0, part.tokens)
                    yield part.tokens, self._decode(own, seen, part.mask)

    def _biased(self, part: Slice) -> Tensor:
        """The mask [1, 1, lines, S]; with a bias, for each head [Hq, 1, lines, S]."""
        if self.bias is None or part.places is None:
            return part.mask
        keys = torch.arange(part.first, part.last, device=part.mask.device)
        apart = (keys - part.places[0, 0] + self.bias.shape[1] // 2).clamp_(0, self.bias.shape[1] - 1)
        return (self.bias[:, None, apart] + part.mask).to(part.mask.dtype)

    def _decode(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """query [R, Hq, D], keys [R, S, 2, Hkv, D]: the query heads of a KV head form the lines of one product."""
        shape = self.shape
        per_head = shape.num_heads // shape.num_kv_heads
        lines = query.view(-1, shape.num_kv_heads, per_head, shape.head_dim)
        if per_head % LINES:
            lines = F.pad(lines, (0, 0, 0, -per_head % LINES))
        sinks = None
        if self.sinks is not None:
            sinks = F.pad(self.sinks.view(1, shape.num_kv_heads, per_head), (0, -per_head % LINES))
        out = self._fused(lines, keys[:, :, 0].transpose(1, 2), keys[:, :, 1].transpose(1, 2), mask, sinks)
        return out[:, :, :per_head].reshape(query.shape[0], -1)

    def _prefill(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """query [n, Hq, D], keys [1, S, 2, Hkv, D]: the tokens form the lines, with one product per query head."""
        shape = self.shape
        count, per_head = query.shape[0], shape.num_heads // shape.num_kv_heads
        lines = query.view(count, shape.num_kv_heads, per_head, shape.head_dim).permute(1, 2, 0, 3)
        if count % LINES:
            lines = F.pad(lines, (0, 0, 0, -count % LINES))
        key, value = (
            part.transpose(0, 1)[:, None].expand(-1, per_head, -1, -1) for part in (keys[0, :, 0], keys[0, :, 1])
        )
        sinks = None if self.sinks is None else self.sinks.view(shape.num_kv_heads, per_head, 1)
        out = self._fused(lines, key, value, mask, sinks)
        return out[:, :, :count].permute(2, 0, 1, 3).reshape(count, -1)

    def _fused(self, lines: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
        """lines [X, Y, M, D], key and value [X, Y, S, D], mask broadcast to [X, Y, M, S], sinks to [X, Y, M]."""
        out: Tensor
        if self.shape.softcap is None and lines.device.type == "cpu":
            out, log_sum = _flash(lines, key, value, 0.0, False, attn_mask=mask, scale=self.shape.scale)
        else:
            out, log_sum = self._plain(lines, key, value, mask)
        if sinks is not None:  # a sink adds exp(sink) to the sum of the softmax
            out = (out * sigmoid(log_sum - sinks.float()).unsqueeze(-1)).to(out.dtype)
        return out

    def _plain(self, lines: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax of capped scores in float32; products with V summed left to right over tiles of one size."""
        sizes = lines.shape[:3]
        if key.stride(1) == 0:  # treat the query heads of a KV head as further lines, so that keys are widened once
            lines, key, value = lines.flatten(1, 2).unsqueeze(1), key[:, :1], value[:, :1]
        scores = torch.matmul(lines.float(), key.float().mT).mul_(self.shape.scale)
        if self.shape.softcap is not None:
            scores = _tanh(scores.div_(self.shape.softcap)).mul_(self.shape.softcap)
        scores = scores.view(*sizes, -1).add_(mask)
        weights = scores.softmax(-1).view(*lines.shape[:3], -1)
        out = None
        for part, values in zip(torch.split(weights, SUM_TILE, -1), torch.split(value, SUM_TILE, 2), strict=True):
            product = torch.matmul(part, values.float())
            out = product if out is None else out.add_(product)
        log_sum = scores.logsumexp(-1) if self.sinks is not None else scores
        result = (torch.empty(0) if out is None else out).view(*sizes, -1).to(value.dtype)
        return result, log_sum


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _tanh(x: Tensor) -> Tensor:
    """In pieces small enough for one thread and a multiple of every vector width: see aten._slabs."""
    for piece in torch.split(x.view(-1), 32768):
        piece.tanh_()
    return x
