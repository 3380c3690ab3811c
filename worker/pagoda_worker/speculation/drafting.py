"""Where drafts come from: a drafter is asked before every step, and learns after it which drafts were accepted.

    NoDrafts       no drafts
    SuffixLookup   the row's own text and earlier outputs of its domain, where they repeat themselves (see `suffixes`)
    DraftModel     a smaller model with the same vocabulary and a cache of its own under the same block ids

and around them, in `forced`, tokens that a row's grammar leaves no choice about.

A drafter may propose anything: a wrong draft costs time and changes no token (see `verification`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from pagoda_proto.steps import Chunk
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.ops import Cache
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.rows.batch import build_batch
from pagoda_worker.rows.drafts import DraftLength, RowDrafts
from pagoda_worker.rows.rows import Ids, Row

Work = Sequence[tuple[Row, Chunk]]

MAX_DRAFTS = 8


class Drafter(Protocol):
    def draft(self, work: Work) -> dict[int, Ids]:
        """Drafts by row id, for chunks that allow them: at least one and at most `num_drafts` for a row."""

    def learn(self, row: Row, num_drafted: int, num_accepted: int) -> int:
        """The row has its new tokens and `num_computed`. Returns how many drafts it would try with its next token."""

    @property
    def reads_all(self) -> bool:
        """Whether it reads the tokens of all rows before every step, so that they must be on the host."""

    @property
    def caches(self) -> Sequence[tuple[LoadedModel, Sequence[Cache]]]:
        """Its own caches under the model's block ids: their blocks are moved along with the model's."""


class NoDrafts:
    caches = ()
    reads_all = False

    def draft(self, work: Work) -> dict[int, Ids]:
        return {}

    def learn(self, row: Row, num_drafted: int, num_accepted: int) -> int:
        return 0


class DraftModel:
    """Drafts greedily. Rows without drafts are caught up a block at a time: every block that is full in the target's
    cache is full in this one, so a prefix hit or a swap holds for both, and a pause costs a pass per block."""

    reads_all = True

    def __init__(self, loaded: LoadedModel, num_blocks: int, config: WorkerConfig, max_drafts: int) -> None:
        self._loaded = loaded
        self._kv = loaded.new_kv_cache(num_blocks, config.block_size)
        self.caches = ((loaded, self._kv),)
        self._block_size = config.block_size
        self._max_tokens = config.max_tokens_per_step
        self._max_drafts = max_drafts

    def draft(self, work: Work) -> dict[int, Ids]:
        counts: dict[int, int] = {}
        behind = []
        for row, chunk in work:
            state, end = self._state(row), chunk.start + chunk.num_tokens
            count = min(chunk.num_drafts, state.length.now)
            if count:
                counts[row.row_id] = count
            if count or chunk.num_tokens > 1 or end // self._block_size * self._block_size > state.num_computed:
                behind.append((row, state.num_computed, end))
                state.num_computed = end
        guesses: dict[int, list[int]] = {}
        for part in _parts(behind, self._max_tokens):
            asking = [i for i, (row, chunk) in enumerate(part) if chunk.sample and row.row_id in counts]
            guesses |= {part[i][0].row_id: [token] for i, token in self._compute(part, {}, asking).items()}
        self._continue({row.row_id: (row, end) for row, _, end in behind}, counts, guesses)
        return {row_id: np.array(tokens, np.int64) for row_id, tokens in guesses.items()}

    def _continue(
        self, rows: Mapping[int, tuple[Row, int]], counts: Mapping[int, int], guesses: dict[int, list[int]]
    ) -> None:
        """Append to the first draft of each row until it has its count, all rows in one pass per draft."""
        while going := [row_id for row_id, tokens in guesses.items() if len(tokens) < counts[row_id]]:
            # Known tokens end where the row's chunk does; the draft to compute follows the drafts before it.
            part = [
                (rows[row_id][0], Chunk(row_id, rows[row_id][1] + len(guesses[row_id]) - 1, 0, False))
                for row_id in going
            ]
            last = {row_id: np.array(guesses[row_id][-1:], np.int64) for row_id in going}
            for i, token in self._compute(part, last, range(len(part))).items():
                guesses[going[i]].append(token)

    def learn(self, row: Row, num_drafted: int, num_accepted: int) -> int:
        state = self._state(row)
        state.length.learn(num_drafted, num_accepted)
        if num_drafted:  # the last draft was made and not computed
            state.num_computed = row.num_computed - (num_accepted == num_drafted)
        return state.length.now

    def _compute(self, part: Work, drafts: Mapping[int, Ids], asking: Sequence[int]) -> dict[int, int]:
        """One pass; returns the most likely next token of the rows in `asking`, by place in `part`."""
        batch = build_batch(part, self._block_size, self._loaded.device, drafts)
        batch = replace(batch, slots=None, logit_slots=None)  # adapters are for the target alone
        hidden = self._loaded.model.forward(batch, self._kv)
        if not len(asking):
            return {}
        ends = torch.tensor([batch.query_starts[i + 1] - 1 for i in asking], device=self._loaded.device)
        tokens: list[int] = self._loaded.model.logits(hidden[ends]).argmax(-1).tolist()
        return dict(zip(asking, tokens, strict=True))

    def _state(self, row: Row) -> RowDrafts:
        if row.drafts is None:
            num_full = row.num_computed // self._block_size
            row.drafts = RowDrafts(DraftLength(self._max_drafts), num_computed=num_full * self._block_size)
        return row.drafts


def _parts(behind: Sequence[tuple[Row, int, int]], max_tokens: int) -> Iterator[list[tuple[Row, Chunk]]]:
    """Token ranges (row, start, end) in batches of at most `max_tokens`; only a range's last chunk has `sample` set."""
    part: list[tuple[Row, Chunk]] = []
    room = max_tokens
    for row, start, end in behind:
        while start < end:
            if not room:
                yield part
                part, room = [], max_tokens
            count = min(room, end - start)
            part.append((row, Chunk(row.row_id, start, count, start + count == end)))
            start, room = start + count, room - count
    if part:
        yield part
