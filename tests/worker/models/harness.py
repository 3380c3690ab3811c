"""Drives a loaded model as a runner does: rows with block tables, chunks, prefix hits, any mix in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pagoda_worker.kernels.kv_cache import KVCache
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots

BLOCK_SIZE = 16


def make_batch(rows: Sequence[tuple[list[int], int, list[int]]], block_size: int) -> Batch:
    """Rows of (new token ids, tokens already computed, block ids)."""
    starts, positions, indices, lens = [0], [], [], []
    for tokens, computed, blocks in rows:
        places = range(computed, computed + len(tokens))
        positions += places
        indices += [blocks[p // block_size] * block_size + p % block_size for p in places]
        starts.append(starts[-1] + len(tokens))
        lens.append(computed + len(tokens))
    width = max(-(-length // block_size) for length in lens)
    tables = [(blocks + [0] * width)[:width] for _, _, blocks in rows]
    return Batch(
        token_ids=torch.tensor([token for tokens, _, _ in rows for token in tokens]),
        positions=torch.tensor(positions),
        kv_indices=torch.tensor(indices),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        query_starts=starts,
        query_lens=[len(tokens) for tokens, _, _ in rows],
        context_lens=lens,
        logit_indices=torch.tensor(starts[1:]) - 1,
    )


@dataclass
class Row:
    """A row of the harness; `logits` has one [V] entry per computed token, `slot` is that of its adapter."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    slot: int = NO_ADAPTER


class Harness:
    """Hands out blocks in scattered order, so that a wrong block table changes the results."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 256, block_size: int = BLOCK_SIZE) -> None:
        self.loaded = loaded
        self.block_size = block_size
        self.kv: Sequence[KVCache] = loaded.new_kv_cache(num_blocks, block_size)  # type: ignore[assignment]
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist()

    def step(self, work: Sequence[tuple[Row, int]]) -> None:
        """Compute the next `count` tokens of each row, all in one batch."""
        parts = []
        for row, count in work:
            missing = -(-(row.computed + count) // self.block_size) - len(row.blocks)
            row.blocks += [self.free.pop() for _ in range(missing)]
            parts.append((row.tokens[row.computed : row.computed + count], row.computed, row.blocks))
        slots = np.repeat([row.slot for row, _ in work], [count for _, count in work]).astype(np.int32)
        adapted = TokenSlots(slots, self.loaded.device) if (slots != NO_ADAPTER).any() else None
        batch = replace(make_batch(parts, self.block_size), slots=adapted)
        model = self.loaded.model
        with torch.inference_mode():
            hidden = model.forward(batch, self.kv)
            logits = model.logits(hidden) if adapted is None else model.logits(hidden, slots=adapted)
        for (row, count), start in zip(work, batch.query_starts, strict=False):
            row.logits += list(logits[start : start + count])
            row.computed += count

    def release(self, row: Row) -> None:
        self.free += row.blocks
        row.blocks = []

    def prefill(self, rows: Sequence[Row], chunk: int) -> None:
        """Compute all known tokens of all rows together, `chunk` tokens per row and step."""
        while work := [
            (row, min(chunk, len(row.tokens) - row.computed)) for row in rows if row.computed < len(row.tokens)
        ]:
            self.step(work)

    def greedy(self, prompts: Sequence[list[int]], count: int, chunk: int = 10**6) -> list[list[int]]:
        """`count` greedy tokens for each prompt, all prompts in one batch."""
        rows = [Row(list(prompt)) for prompt in prompts]
        self.prefill(rows, chunk)
        for _ in range(count - 1):
            for row in rows:
                row.tokens.append(int(row.logits[-1].argmax()))
            self.step([(row, 1) for row in rows])
        for row in rows:
            row.tokens.append(int(row.logits[-1].argmax()))
            self.release(row)
        return [row.tokens[-count:] for row in rows]


def logits_of(loaded: LoadedModel, tokens: list[int], chunks: Sequence[int], slot: int = NO_ADAPTER) -> torch.Tensor:
    """Logits [n, V] after every token of a row computed alone, in chunks of these sizes (the last size repeats)."""
    harness, row = Harness(loaded), Row(tokens, slot=slot)
    sizes = list(chunks)
    while row.computed < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        harness.step([(row, min(size, len(tokens) - row.computed))])
    return torch.stack(row.logits)
