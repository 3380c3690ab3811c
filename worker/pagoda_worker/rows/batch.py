"""One forward pass of many rows, laid out as tensors.

All chunks of a step are packed without padding; every op finds its row through `query_starts`. Prefill and decode are
not distinguished: a row has `query_lens[i]` new tokens at the end of `context_lens[i]` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pagoda_proto.steps import Chunk
from pagoda_worker.rows.rows import Ids, Ints
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots

NO_DRAFTS: Mapping[int, Ids] = {}


class Places(NamedTuple):
    """Where the K and V of a batch's tokens are, by one of the rows' block tables; see `Batch`."""

    kv_indices: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """T packed new tokens of B rows; logits are wanted for R of the tokens.

    The lists repeat small facts on the host so that no op has to read a tensor back. The places here are by the first
    block table of the rows, `others` those by the other tables; an op gets the batch `at` its group's table.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute position of each token in its row
    kv_indices: torch.Tensor  # [T] int64, where this token's K and V go: block_id * block_size + offset
    block_tables: torch.Tensor  # [B, max_blocks] int32, padded with 0
    query_starts: list[int]  # [B + 1], token range of row i is query_starts[i] : query_starts[i + 1]
    query_lens: list[int]  # [B]
    context_lens: list[int]  # [B], tokens in the KV cache after this step's are written
    logit_indices: torch.Tensor  # [R] int64, tokens whose logits are wanted, in row order
    others: tuple[Places, ...] = ()
    slots: TokenSlots | None = None  # adapter slot of each token; None if no row has an adapter
    logit_slots: TokenSlots | None = None  # the same for the tokens whose logits are wanted
    device_lengths: torch.Tensor | None = None  # see `lengths`; set if the device already has them
    bounded: bool = False  # `context_lens` are upper bounds: for recording a step of one new token per row

    def at(self, table: int) -> Batch:
        """The batch as seen by layers that use this block table."""
        return replace(self, **self.others[table - 1]._asdict(), others=()) if table else self

    def in_chunks(self, size: int, block_size: int) -> Batch:
        """The batch as seen by attention within chunks of `size` tokens: each chunk with new tokens is a row, whose
        blocks and positions start at the chunk's start.

        A chunk is a whole number of blocks. The view of a batch made for recording is renewed by `follow`.
        """
        if max(self.context_lens) <= size:
            return self
        if self.bounded:
            tables, lengths = self._chunk_lines(size, block_size)
            context_lens = [min(size, most) for most in self.context_lens]
            return replace(self, block_tables=tables, context_lens=context_lens, device_lengths=lengths)
        spans = [
            (row, chunk, max(end - count, chunk), min(end, chunk + size))
            for row, (end, count) in enumerate(zip(self.context_lens, self.query_lens, strict=True))
            for chunk in range((end - count) // size * size, end, size)
        ]
        lens, ends = [end - start for *_, start, end in spans], [end - chunk for _, chunk, _, end in spans]
        rows, firsts = np.array([(row, chunk // block_size) for row, chunk, *_ in spans]).T
        entries = firsts[:, None] + np.arange(-(-max(ends) // block_size))
        np.minimum(entries, self.block_tables.shape[1] - 1, out=entries)  # entries beyond a row's end are not read
        places = torch.from_numpy(np.stack(np.broadcast_arrays(rows[:, None], entries))).to(self.block_tables.device)
        return replace(
            self,
            positions=self.positions % size,
            block_tables=self.block_tables[places[0], places[1]],
            query_starts=[0, *accumulate(lens)],
            query_lens=lens,
            context_lens=ends,
            device_lengths=None,
        )

    def follow(self, batch: Batch, size: int, block_size: int) -> None:
        """Renew this view, made by `batch.in_chunks` when the device held other lengths."""
        tables, lengths = batch._chunk_lines(size, block_size)
        self.block_tables.copy_(tables)
        self.lengths.copy_(lengths)

    def _chunk_lines(self, size: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block tables and lengths of `in_chunks` for rows of one new token each, from what the device knows."""
        last, width = self.lengths - 1, min(size // block_size, self.block_tables.shape[1])
        entries = (last // size * (size // block_size))[:, None] + torch.arange(width, device=last.device)
        entries = entries.clamp(max=self.block_tables.shape[1] - 1)  # entries beyond a row's end are not read
        return self.block_tables.gather(1, entries.long()), (last % size + 1).to(torch.int32)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[B] int32: `context_lens` on the tokens' device. A recorded step reads this instead of the list."""
        if self.device_lengths is not None:
            return self.device_lengths
        return torch.from_numpy(np.array(self.context_lens, np.int32)).to(self.token_ids.device)

    @cached_property
    def starts(self) -> torch.Tensor:
        """[B + 1] int32: `query_starts` on the host."""
        return torch.from_numpy(np.array(self.query_starts, np.int32))

    @cached_property
    def num_logits(self) -> int:
        """Number of tokens whose logits are wanted."""
        return len(self.logit_indices)

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]


class Laid(Protocol):
    """What a batch is laid out from: rows, and their stand-ins."""

    @property
    def row_id(self) -> int: ...
    @property
    def tokens(self) -> Ints: ...
    @property
    def blocks(self) -> Ints: ...
    @property
    def others(self) -> Sequence[Ints]: ...
    @property
    def slot(self) -> int: ...


def build_batch(
    work: Sequence[tuple[Laid, Chunk]], block_size: int, device: torch.device, drafts: Mapping[int, Ids] = NO_DRAFTS
) -> Batch:
    """Lay out at least one chunk, each of a different row whose tokens and blocks cover it.

    A row's `drafts` follow its chunk; if the chunk samples, their logits are wanted as well.

    Python runs once per row and numpy once per batch, which keeps 64 decoding rows to a fraction of a millisecond.
    """
    token_ids, lens = _tokens_of(work, drafts)
    firsts = np.array([chunk.start for _, chunk in work])
    context_lens = (firsts + lens).tolist()
    if lens.count(1) == len(work):
        starts = np.arange(len(work) + 1)
        row_of_token, positions = starts[:-1], firsts
    else:
        starts = np.cumsum([0, *lens])
        row_of_token = np.repeat(np.arange(len(work)), lens)
        positions = np.arange(starts[-1]) + (firsts - starts[:-1])[row_of_token]
    place_of_token = row_of_token, positions // block_size, positions % block_size

    def places(tables: Sequence[Ints]) -> Places:
        return _places(
            tables, [-(-length // block_size) for length in context_lens], place_of_token, block_size, device
        )

    logit_indices = _logit_indices(work, starts, bool(drafts))
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        **places([row.blocks for row, _ in work])._asdict(),
        others=tuple(places([row.others[i] for row, _ in work]) for i in range(len(work[0][0].others))),
        query_starts=starts.tolist(),
        query_lens=lens,
        context_lens=context_lens,
        logit_indices=torch.from_numpy(logit_indices).to(device),
        slots=_slots(work, row_of_token, device),
        logit_slots=_slots(work, row_of_token[logit_indices], device),
    )


def _tokens_of(work: Sequence[tuple[Laid, Chunk]], drafts: Mapping[int, Ids]) -> tuple[Ids, list[int]]:
    """The tokens, and the number of tokens of each row."""
    if not drafts and all(chunk.num_tokens == 1 for _, chunk in work):  # nearly every decode step
        return np.array([row.tokens.array[chunk.start] for row, chunk in work]), [1] * len(work)
    parts = [row.tokens.array[chunk.start : chunk.start + chunk.num_tokens] for row, chunk in work]
    for i, (row, _) in enumerate(work if drafts else ()):
        if row.row_id in drafts:
            parts[i] = np.concatenate((parts[i], drafts[row.row_id]))
    return np.concatenate(parts), [len(part) for part in parts]


def _places(
    tables: Sequence[Ints],
    lengths: Sequence[int],
    of_token: tuple[Ids, Ids, Ids],
    block_size: int,
    device: torch.device,
) -> Places:
    """Places by one table of each row, of which it uses `lengths` entries; `of_token`: row, entry and offset there."""
    cells = np.zeros((len(tables), max(lengths)), np.int32)
    for i, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        blocks = table.array[:length]
        cells[i, : len(blocks)] = blocks
        if len(blocks) and blocks[0] < 0:  # unkept blocks are not read, but need a valid id
            np.maximum(cells[i], 0, out=cells[i])
    rows, entries, offsets = of_token
    indices = cells[rows, entries].astype(np.int64) * block_size + offsets
    return Places(torch.from_numpy(indices).to(device), torch.from_numpy(cells).to(device))


def batch_of_spans(spans: Sequence[tuple[int, int]], tables: torch.Tensor) -> Batch:
    """A stand-in for a real batch: one row per span, of which tokens [start, end) are new.

    Token ids and KV indices are the positions, and no logits are wanted. tables: [rows, blocks] int32, on the device.
    """
    positions = torch.cat([torch.arange(start, end) for start, end in spans]).to(tables.device)
    lens = [end - start for start, end in spans]
    return Batch(
        token_ids=positions,
        positions=positions,
        kv_indices=positions,
        block_tables=tables,
        query_starts=[0, *accumulate(lens)],
        query_lens=lens,
        context_lens=[end for _, end in spans],
        logit_indices=positions[:0],
    )


def _slots(work: Sequence[tuple[Laid, Chunk]], row_of_token: Ids, device: torch.device) -> TokenSlots | None:
    if all(row.slot == NO_ADAPTER for row, _ in work):
        return None
    return TokenSlots(np.array([row.slot for row, _ in work], np.int32)[row_of_token], device)


def _logit_indices(work: Sequence[tuple[Laid, Chunk]], starts: Ids, drafted: bool) -> Ids:
    """The last known token of each chunk that samples, and the drafts that follow it."""
    sampled = np.array([chunk.sample for _, chunk in work])
    indices: Ids = starts[1:][sampled] - 1
    if not drafted:
        return indices
    firsts = starts[:-1] + np.fromiter((chunk.num_tokens for _, chunk in work), np.int64, len(work)) - 1
    counts = (starts[1:] - firsts)[sampled]
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    indices = np.repeat(firsts[sampled], counts) + places
    return indices
