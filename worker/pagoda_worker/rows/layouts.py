"""Lays out one step after the other on the host.

A step of rows that decode usually continues the one before: the same rows, each with its next token. Its batch is then
that of the step before, renewed in place: only the tokens change, everything else moves by one, and a row that begins a
block enters it into its table. This matters because between two steps the weights have driven everything else out of
the caches: each new tensor costs some ten microseconds there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pagoda_proto.steps import Chunk
from pagoda_worker.rows.batch import NO_DRAFTS, Batch, build_batch
from pagoda_worker.rows.rows import Ids, Row

HOST = torch.device("cpu")
Work = Sequence[tuple[Row, Chunk]]


class Layouts:
    """`block_size`: of the KV cache."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: _Decoding | None = None

    def next(self, work: Work, drafts: Mapping[int, Ids] = NO_DRAFTS) -> Batch:
        """The same as `build_batch` on the host; valid until the next call, which may return the same object."""
        if self._last is not None and not drafts and self._last.continues(work):
            self._last.renew(work)
            return self._last.batch
        self._last = None
        batch = build_batch(work, self._block_size, HOST, drafts)
        if len(work) == batch.num_tokens == batch.num_logits:
            self._last = _Decoding(work, batch, self._block_size)
        return batch


class _Decoding:
    """A batch of one token of each row, with its tensors' numbers."""

    def __init__(self, work: Work, batch: Batch, block_size: int) -> None:
        self.batch = batch
        self._block_size = block_size
        self._blocks = [row.blocks for row, _ in work]
        self._token_ids, self._positions, self._lengths = map(
            _numbers, (batch.token_ids, batch.positions, batch.lengths)
        )
        places = [(batch.kv_indices, batch.block_tables), *batch.others]
        self._places = [(_numbers(indices), _numbers(table)) for indices, table in places]
        self._room = batch.block_tables.shape[1] * block_size  # tokens of the longest row

    def continues(self, work: Work) -> bool:
        """Whether these are the same rows, each with its next token, and the tables have room for these."""
        if len(work) != len(self._blocks):
            return False
        return all(
            row.blocks is blocks and chunk.start == start < self._room and chunk.num_tokens == 1 and chunk.sample
            for (row, chunk), blocks, start in zip(work, self._blocks, self.batch.context_lens, strict=True)
        )

    def renew(self, work: Work) -> None:
        for line, (row, chunk) in enumerate(work):
            start = chunk.start
            self._token_ids[line] = row.tokens[start]
            self._positions[line] = start
            self._lengths[line] = self.batch.context_lens[line] = start + 1
            entry, offset = divmod(start, self._block_size)
            for (indices, table), blocks in zip(self._places, (row.blocks, *row.others), strict=True):
                if offset:
                    indices[line] += 1
                else:
                    table[line, entry] = blocks[entry]
                    indices[line] = blocks[entry] * self._block_size


def _numbers(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory: of all that Python can write a number to, the least work."""
    return tensor.numpy().data
