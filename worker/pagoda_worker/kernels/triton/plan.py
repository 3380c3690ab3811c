"""Cuts a step's attention into tiles of lines, on the host, once per step and group size.

Rows whose new tokens fit one low tile (decodes, short chunks) use low tiles; the others are cut into high tiles, which
feed the tensor cores. The choice changes no bits, so it is made for speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
from torch import Tensor

from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.kernels.triton.attention import SPLIT, Launch
from pagoda_worker.rows.batch import Batch

SHARED_BYTES = 99 * 1024  # shared memory available to a program on every device since sm_80
WAVES = 8  # the most waves of programs that fill the device: a recorded step must serve contexts of any length


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Heights of tiles in lines; `low` and `high` are powers of two, at least 16.

    Attributes:
        low: For rows with few new tokens. Below 64, tensor cores use another instruction than for `high`.
        high: For the others. float32, which tensor cores do not multiply, uses `low`; beyond 128 dimensions per head
            the limit is 64, for lack of registers.
        fill: Programs that fill the device; with fewer, the splits of low tiles get programs of their own.
        shared_bytes: Shared memory of a program, which limits the tiles of keys in flight. Changes no bits.
    """

    low: int = 16
    high: int = 128
    fill: int
    shared_bytes: int = SHARED_BYTES

    def high_for(self, width: int, dtype: torch.dtype) -> int:
        if dtype == torch.float32:
            return self.low
        return self.high if width <= 128 else min(self.high, 64)


@dataclass(frozen=True)
class Work:
    """Work items [n, 4] (see `attention`) of `lines` lines each, at most `used_lines` of which are used."""

    items: Tensor
    lines: int
    used_lines: int


@dataclass
class Plan:
    """What all layers of a step share. `max_context` bounds the lengths in `contexts`, which live on the device."""

    tables: Tensor  # [B, max_blocks] int32
    contexts: Tensor  # [B] int32
    query_starts: Sequence[int]
    query_lens: Sequence[int]
    max_context: int
    tiles: Tiles
    dtype: torch.dtype
    _work: dict[tuple[int, int], list[Work]] = field(default_factory=dict)

    def work(self, group: int, width: int) -> list[Work]:
        """The low and the high tiles for `group` heads per KV head of `width` dimensions, without empty lists."""
        if (group, width) not in self._work:
            self._work[group, width] = self._cut(group, width)
        return self._work[group, width]

    def _cut(self, group: int, width: int) -> list[Work]:
        least = max(16, triton.next_power_of_2(group))
        low = max(self.tiles.low, least)
        high = max(low, self.tiles.high_for(width, self.dtype))
        counts, starts = np.array(self.query_lens, np.int32), np.array(self.query_starts[:-1], np.int32)
        rows = np.arange(len(counts), dtype=np.int32)
        short = counts * group <= low
        short_rows, long_rows = rows[short & (counts > 0)], rows[~short]
        found = []
        if len(short_rows):
            used = int(counts[short_rows].max()) * group
            found.append((short_rows, np.zeros_like(short_rows), low, used))
        if len(long_rows):
            capacity = high // group
            tiles = -(-counts[long_rows] // capacity)
            firsts = np.concatenate([np.arange(n, dtype=np.int32) for n in tiles]) * capacity
            # The last tiles of a row have the most keys: start them first, so that they do not finish last.
            found.append((np.repeat(long_rows, tiles)[::-1], firsts[::-1], high, capacity * group))
        return [
            Work(self._upload(np.stack((row, starts[row], counts[row], first), 1)), lines, used)
            for row, first, lines, used in found
        ]

    def _upload(self, items: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(items, np.int32)).to(self.tables.device, non_blocking=True)


def make_plan(batch: Batch, tiles: Tiles, dtype: torch.dtype) -> Plan:
    return Plan(
        tables=batch.block_tables,
        contexts=batch.lengths,
        query_starts=batch.query_starts,
        query_lens=batch.query_lens,
        max_context=max(batch.context_lens, default=0),
        tiles=tiles,
        dtype=dtype,
    )


def attend(
    query: Tensor, cache: tuple[Tensor, Tensor], plan: Plan, shape: AttentionShape, sinks: Tensor | None
) -> Tensor:
    """See Ops.attend; cache: keys and values [num_blocks, Hkv, block_size, D] of one layer."""
    out = query.new_empty((query.shape[0], shape.num_heads * shape.head_dim))
    launch = Launch(query, out, cache, (plan.tables, plan.contexts), shape, sinks, plan.tiles.shared_bytes)
    num_splits = -(-plan.max_context // SPLIT)
    for work in plan.work(shape.num_heads // shape.num_kv_heads, shape.head_dim):
        programs = len(work.items) * shape.num_kv_heads
        if programs < plan.tiles.fill and num_splits > 1 and work.lines <= max(plan.tiles.low, 16):
            most = -(-WAVES * plan.tiles.fill // programs)
            launch.split(work.items, work.lines, work.used_lines, num_splits, min(num_splits, most))
        else:
            launch.walk(work.items, work.lines)
    return out
