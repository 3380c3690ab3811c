"""Rows that are read whole lie in a step as parts: a row is one, or two where its texts do not see each other.

What fills up a query is seen by no token, and sees what is before it: each such token is laid out by itself, over a
context that ends before all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from pagoda_proto.pooling.params import MAX_SIM
from pagoda_proto.steps import Chunk
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.rows import Ints, Row
from pagoda_worker.step.pending import Work

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """Stands for a row where a batch is laid out."""

    row_id: int
    tokens: Ints
    blocks: Ints
    slot: int
    others: tuple[Ints, ...] = ()


class _Span(NamedTuple):
    """Tokens [start, end) of a row, of which the last `unseen` are seen by none."""

    start: int
    end: int
    unseen: int


def laid_out(work: Work, block_size: int) -> Batch:
    """All of each row, in blocks one behind the other; positions count from a part's first token."""
    parts: list[tuple[Part, Chunk]] = []
    contexts: list[int] = []
    first_block = 0
    for row, chunk in work:
        for span in _spans(row, chunk.num_tokens):
            after = first_block - -(span.end - span.start) // block_size
            tokens, blocks = row.tokens.array[span.start : span.end], np.arange(first_block, after)
            part = Part(row.row_id, Ints(tokens), Ints(blocks), row.slot)
            first_block = after
            seen = span.end - span.start - span.unseen
            for start, count in ((0, seen), *((seen + i, 1) for i in range(span.unseen))):
                parts.append((part, Chunk(row.row_id, start, count, False)))
                contexts.append(seen)
    return replace(build_batch(parts, block_size, HOST), context_lens=contexts)


def _spans(row: Row, length: int) -> Iterator[_Span]:
    params = row.pooling
    if params is None or params.output != MAX_SIM:
        yield _Span(0, length, 0 if params is None else params.unseen)
        return
    yield _Span(0, params.second_start, params.unseen)
    yield _Span(params.second_start, length, 0)
