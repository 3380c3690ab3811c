"""Decode steps whose inputs stay on the device: one line per row, which advances by itself within a block.

A line is a cache of its row. The host remembers what it wrote to each line, and before a step rewrites every line that
does not match its row: if the row is new there or was computed elsewhere meanwhile, or if its next token begins a
block. So no message says when a row ends, and whatever is in doubt is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_not

import numpy as np
import torch

from pagoda_proto.steps import Chunk
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.rows.batch import Batch, Places
from pagoda_worker.rows.rows import Ids, Ints, Row
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots
from pagoda_worker.step.pending import OnDevice, Work

NOWHERE = -1  # position of a line of which only the blocks are known
PADDING = -2  # position of a line that stands for no row


class Lines:
    """The inputs of decode steps of up to `max_rows` rows, at fixed addresses.

    A step is `write`, the computation that reads the lines, and `advance` if the device chose the tokens.

    Args:
        max_rows: Of the largest step.
        max_len: Most tokens of a row.
        block_size: Tokens per KV block.
        scratch_blocks: For each table, the block that lines without a row write to; no row has it.
        device: Of the model.
    """

    def __init__(
        self, *, max_rows: int, max_len: int, block_size: int, scratch_blocks: Sequence[int], device: torch.device
    ) -> None:
        self._max_len = max_len
        self._block_size = block_size
        self._scratch_blocks = np.array(scratch_blocks, np.int64)
        self._heads = torch.zeros(3 + len(scratch_blocks), max_rows, dtype=torch.int64, device=device)
        self._token_ids, self._slots, self._positions, *self._kv_indices = self._heads.unbind()
        self._slots.fill_(NO_ADAPTER)
        self._lengths = torch.ones(max_rows, dtype=torch.int32, device=device)
        width = -(-max_len // block_size)
        self._tables = torch.zeros(len(scratch_blocks), max_rows, width, dtype=torch.int32, device=device)
        for scratch, indices, table in zip(scratch_blocks, self._kv_indices, self._tables, strict=True):
            indices.fill_(scratch * block_size)
            table[:, 0] = scratch
        self._order = torch.arange(max_rows, device=device)
        # The host's view of each line: the blocks it has, how many of them, and the position whose token it holds.
        self._blocks: list[Ints | None] = [None] * max_rows
        self._num_blocks = np.zeros(max_rows, np.int64)
        self._at = np.full(max_rows, PADDING)
        self._line_of: dict[int, int] = {}  # by the id of the blocks
        self._sure = True
        self._starts = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (self._heads, self._lengths, self._tables, self._order))

    def batch(self, size: int, adapted: bool = False) -> Batch:
        """The first `size` lines as the batch to record: its tensors are the lines, its lists are bounds. `adapted`:
        some may have adapters."""
        tables = zip(self._kv_indices, self._tables, strict=True)
        first, *others = [Places(indices[:size], table[:size]) for indices, table in tables]
        slots = TokenSlots(np.full(size, NO_ADAPTER, np.int32), self._slots.device, self._slots[:size])
        return Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            **first._asdict(),
            others=tuple(others),
            query_starts=list(range(size + 1)),
            query_lens=[1] * size,
            context_lens=[self._max_len] * size,
            logit_indices=self._order[:size],
            slots=slots if adapted else None,
            logit_slots=slots if adapted else None,
            device_lengths=self._lengths[:size],
            bounded=True,
        )

    def lay_out(self, size: int) -> None:
        """Derive lengths from the lines: the first operation of a recorded step."""
        torch.add(self._positions[:size], 1, out=self._lengths[:size])

    def arranged(self, work: Work) -> Work:
        """`work` with each row at the place of its line, the order in which `write` has least to do."""
        places: list[tuple[Row, Chunk] | None] = [None] * len(work)
        others = []
        for item in work:
            line = self._line_of.get(id(item[0].blocks), len(work))
            if line < len(work):
                places[line] = item
            else:
                others.append(item)
        left = iter(others)
        return [next(left) if item is None else item for item in places]

    def write(self, work: Work, size: int, earlier: Sequence[OnDevice], accelerator: Accelerator) -> None:
        """Make the first `size` lines those of `work` (one known token per row, in order), the rest of them padding.

        `earlier` steps have tokens of these rows that the host does not know yet. Makes at most one upload.
        """
        if not self._sure:
            self._forget()
        self._sure = False  # until all writes have been queued on the device
        count = len(work)
        starts = np.fromiter((chunk.start for _, chunk in work), np.int64, count)
        blocks = [row.blocks for row, _ in work]
        strange = np.fromiter(map(is_not, blocks, self._blocks), bool, count)
        self._num_blocks[:count][strange] = 0
        lost = strange | (self._at[:count] != starts)
        stale = np.flatnonzero(lost | (starts % self._block_size == 0))
        idle = np.flatnonzero(self._at[count:size] != PADDING) + count
        if len(stale) or len(idle):
            tables = [blocks, *([row.others[i] for row, _ in work] for i in range(len(self._scratch_blocks) - 1))]
            slots = np.fromiter((row.slot for row, _ in work), np.int64, count)
            parts = [self._heads_of(tables, starts, slots, stale, idle), self._cells_of(tables, starts, stale, idle)]
            parts += _tokens_of(work, np.flatnonzero(lost).tolist(), earlier)
            self._put(parts, earlier, accelerator)
        self._blocks[:size] = [*blocks, *repeat(None, size - count)]
        if len(idle) or strange.any():  # of two lines with the blocks of one row, the lower is the newer
            self._line_of = {id(held): line for line, held in reversed([*enumerate(self._blocks)])}
        self._at[:count], self._at[count:size] = NOWHERE, PADDING  # until `advance`
        self._starts = starts
        self._sure = True

    def advance(self, ids: torch.Tensor) -> None:
        """The rows of the last `write` have computed their token and continue with `ids` [R] int64.

        An invalid id becomes 0, which any model can compute; the row ends when the host reads the ids.
        """
        count = len(ids)
        torch.clamp(ids, min=0, out=self._token_ids[:count])
        self._heads[2:, :count].add_(1)
        self._at[:count] = self._starts + 1

    def _forget(self) -> None:
        self._blocks = [None] * len(self._blocks)
        self._at.fill(NOWHERE)
        self._line_of = {}

    def _heads_of(self, tables: Sequence[Sequence[Ints]], starts: Ids, slots: Ids, stale: Ids, idle: Ids) -> Ids:
        """[3 + tables, n]: line, slot, position, KV indices."""
        positions = starts[stale]
        indices = positions // self._block_size
        heads = np.zeros((3 + len(tables), len(stale) + len(idle)), np.int64)
        heads[:3, : len(stale)] = stale, slots[stale], positions
        for cells, blocks in zip(heads[3:], tables, strict=True):
            ids = [blocks[line].array[index] for line, index in zip(stale.tolist(), indices.tolist(), strict=True)]
            cells[: len(stale)] = np.array(ids, np.int64) * self._block_size + positions % self._block_size
        heads[0, len(stale) :], heads[1, len(stale) :] = idle, NO_ADAPTER
        heads[3:, len(stale) :] = self._scratch_blocks[:, None] * self._block_size
        return heads

    def _cells_of(self, tables: Sequence[Sequence[Ints]], starts: Ids, stale: Ids, idle: Ids) -> Ids:
        """[2, n]: place in all block tables, block; for the blocks that lines need and lack."""
        _, lines, width = self._tables.shape
        places: list[int] = []
        ids: list[int] = []
        have, need = self._num_blocks[stale], starts[stale] // self._block_size + 1
        for number, blocks in enumerate(tables):
            places += ((idle + number * lines) * width).tolist()
            ids += [int(self._scratch_blocks[number])] * len(idle)
            for line, begin, end in zip(stale.tolist(), have.tolist(), need.tolist(), strict=True):
                first = (number * lines + line) * width
                places += range(first + begin, first + end)
                ids += np.maximum(blocks[line].array[begin:end], 0).tolist()  # blocks not kept are not read
        self._num_blocks[stale] = need
        return np.array((places, ids), np.int64)

    def _put(self, parts: Sequence[Ids], earlier: Sequence[OnDevice], accelerator: Accelerator) -> None:
        """Send `parts`, [k, n] each, in one upload, and scatter them to their places."""
        sent = accelerator.upload(torch.from_numpy(np.concatenate([part.ravel() for part in parts])))
        pieces = torch.split(sent, [part.size for part in parts])
        heads, cells, tokens, *fed = (piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))
        self._heads[1:].index_copy_(1, heads[0], heads[1:])
        if cells.numel():
            self._tables.view(-1).index_copy_(0, cells[0], cells[1].int())
        if tokens.numel():
            self._token_ids.index_copy_(0, tokens[0], tokens[1])
        for step, (lines, sources) in zip(earlier, fed, strict=True):
            if len(lines):
                self._token_ids.index_copy_(0, lines, step.ids.index_select(0, sources).clamp_(min=0))


def _tokens_of(work: Work, lost: Sequence[int], earlier: Sequence[OnDevice]) -> list[Ids]:
    """[2, n]: line, token; then for each earlier step: line, place in its ids."""
    tokens = [work[line][0].tokens.array[work[line][1].start] for line in lost]
    found = [np.array((lost, tokens), np.int64)]
    for step in earlier:
        promises = ((line, step.promised.get(work[line][0].row_id)) for line in lost)
        pairs = [(line, promise[0]) for line, promise in promises if promise is not None]
        found.append(np.array(pairs, np.int64).reshape(-1, 2).T)
    return found
