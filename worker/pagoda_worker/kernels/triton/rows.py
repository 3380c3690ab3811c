"""Rows that live on the device: a decode step's sampled tokens become the next step's inputs without the host.

The host writes a row's line when the row arrives or its block table grows; `advance` does the rest. A decode batch is
a list of lines, one per place in the batch; -1 is a place without a row, which stays idle: its kv_index is -1 and its
work item has no row, so a batch of fixed size can serve fewer rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 128


@dataclass(frozen=True)
class DeviceRows:
    """Lines of M rows.

    Attributes:
        last_token: [M] int64, the token the row's next step computes.
        position: [M] int64, its position; everything before it is in the cache.
        context_len: [M] int32, position + 1: what `attention` reads as the context of the line.
        output_position: [M] int64, outputs so far: where the row's random stream stands.
        block_tables: [M, max_blocks] int32.
        counts_row: [M] int32, the row's line of `sampling.Requests.counts`, or -1.
    """

    last_token: torch.Tensor
    position: torch.Tensor
    context_len: torch.Tensor
    output_position: torch.Tensor
    block_tables: torch.Tensor
    counts_row: torch.Tensor

    @classmethod
    def empty(cls, max_rows: int, max_blocks: int, device: torch.device) -> DeviceRows:
        whole = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        return cls(
            last_token=whole[0],
            position=whole[1],
            context_len=torch.zeros(max_rows, dtype=torch.int32, device=device),
            output_position=whole[2],
            block_tables=torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device),
            counts_row=torch.full((max_rows,), -1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DecodeInputs:
    """The next decode step of B places, overwritten by `advance`: token_ids, positions, kv_indices [B] int64, and the
    work items [B, 4] int32 of `attention`, which name lines of DeviceRows."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    work: torch.Tensor

    @classmethod
    def empty(cls, size: int, device: torch.device) -> DecodeInputs:
        whole = torch.zeros(3, size, dtype=torch.int64, device=device)
        return cls(whole[0], whole[1], whole[2], torch.zeros(size, 4, dtype=torch.int32, device=device))


@triton.jit
def advance_kernel(
    last_token, position, context_len, output_position, block_tables, counts_row,
    token_ids, positions, kv_indices, work, lines, sampled, counts, size, table_stride, vocab,
    BLOCK_SIZE: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < size
    line = tl.load(lines + place, mask=here, other=-1).to(tl.int64)
    used = line >= 0
    token = tl.load(sampled + place, mask=used, other=0)
    at = tl.load(position + line, mask=used, other=-1) + 1
    block = tl.load(block_tables + line * table_stride + at // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
    tl.store(last_token + line, token, mask=used)
    tl.store(position + line, at, mask=used)
    tl.store(context_len + line, (at + 1).to(tl.int32), mask=used)
    tl.store(output_position + line, tl.load(output_position + line, mask=used, other=0) + 1, mask=used)
    tl.store(token_ids + place, token, mask=here)
    tl.store(positions + place, at, mask=here)
    tl.store(kv_indices + place, tl.where(used, block * BLOCK_SIZE + at % BLOCK_SIZE, -1), mask=here)
    tl.store(work + place * 4, line.to(tl.int32), mask=here)
    tl.store(work + place * 4 + 1, place, mask=here)
    tl.store(work + place * 4 + 2, 1, mask=here)
    tl.store(work + place * 4 + 3, 0, mask=here)
    if COUNTS:
        count = tl.load(counts_row + line, mask=used, other=-1).to(tl.int64)
        cell = counts + count * vocab + token
        counted = used & (count >= 0)
        tl.store(cell, tl.load(cell, mask=counted, other=0) + 1, mask=counted)


def advance(
    rows: DeviceRows,
    inputs: DecodeInputs,
    lines: torch.Tensor,
    sampled: torch.Tensor,
    block_size: int,
    counts: torch.Tensor | None = None,
) -> None:
    """After a decode step: feed `sampled` back, advance the rows, lay out the next step in `inputs`.

    Args:
        rows: Changed in place; a row's table must have the block of its new position.
        inputs: Overwritten. A place without a row gets token 0 at position 0 and writes no K and V.
        lines: [B] int32, distinct lines of `rows`, or -1.
        sampled: [B] int64, what `sampling.sample` chose.
        block_size: Tokens per block.
        counts: [C, V] int32, outputs so far, counted up for rows with a `counts_row`.
    """
    size = len(lines)
    if size:
        advance_kernel[(triton.cdiv(size, BLOCK),)](
            rows.last_token, rows.position, rows.context_len, rows.output_position, rows.block_tables,
            rows.counts_row, inputs.token_ids, inputs.positions, inputs.kv_indices, inputs.work, lines, sampled,
            lines if counts is None else counts, size, rows.block_tables.stride(0),
            0 if counts is None else counts.shape[1], BLOCK_SIZE=block_size, COUNTS=counts is not None, BLOCK=BLOCK,
        )  # fmt: skip
