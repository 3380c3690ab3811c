"""The layout of rows that are read whole: a row is one part, or two if its texts do not attend to each other.

No token attends to the padding of a query, but padding attends to the tokens before it: each padding token is laid out
on its own, over a context that ends before all of them.
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
    """Stands in for a row in a batch layout."""

    row_id: int
    tokens: Ints
    blocks: Ints
    slot: int
    others: tuple[Ints, ...] = ()


class _Span(NamedTuple):
    """Tokens [start, end) of a row; no token attends to the last `unseen` of them."""

    start: int
    end: int
    unseen: int


def laid_out(work: Work, block_size: int) -> Batch:
    """Lay out each row whole, in consecutive blocks; positions count from a part's first token."""
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
