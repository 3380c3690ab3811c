"""Which tokens layers keep: the K and V of all tokens, or of a sliding window.

Layers that keep the same tokens share one of a row's block tables. The number of blocks of each table is decided once,
at startup: a row of the longest allowed length always fits, and of what is left, layers with a window get what a row
twelve windows long would use beside the layers that keep most, so that such rows exhaust all tables at about the same
time, but no more than `max_rows` rows can use. So `num_blocks` remains one number, that of the first table.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from pagoda_proto.steps import MAX_KV_GROUPS, MAX_STEPS_IN_FLIGHT
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Ops

MEAN_WINDOWS = 12
STEPS_IN_FLIGHT, CHUNK_TOKENS = 2, 512
"""Each row has room for this many steps beyond its window, of this many tokens each; an engine core that would plan
more plans as much as fits."""


@dataclass(frozen=True)
class Retention:
    """What the layers of one table keep: all tokens (`kept` is 0), or at least the `kept` before the next.

    Attributes:
        row_blocks: Most that one row has at once, including its steps in flight.
        first, extra, share: If the first table has `first` blocks, this one has `extra`; `share` more for each block
            that the first has beyond that, up to `most`.
        most: Blocks that rows could use in all.
    """

    kept: int = 0
    row_blocks: int = sys.maxsize
    first: int = 0
    extra: int = 0
    share: float = 1.0
    most: int = sys.maxsize

    def num_blocks(self, first: int) -> int:
        """Blocks of this table, if the first table has `first`; for the first table itself, `first`."""
        return min(first, self.most, self.extra + math.ceil(max(0, first - self.first) * self.share))


KEEP_ALL = (Retention(),)


class Keeping(Protocol):
    """The parts of a loaded model used here."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def kv_groups(self) -> tuple[KVShape, ...]: ...

    @property
    def retentions(self) -> tuple[Retention, ...]: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def ops(self) -> Ops: ...


M = TypeVar("M", bound=Keeping)


def settled(config: WorkerConfig, *models: M) -> list[M]:
    """These models, which serve together, with their retention; the first one's longest context applies to all.

    Raises ValueError if a block would lie in two chunks of attention.
    """
    max_len = models[0].max_model_len
    chunks = {shape.window for model in models for shape in model.kv_groups if shape.chunked and shape.window}
    if torn := sorted(chunk for chunk in chunks if chunk % config.block_size):
        problem = f"the model attends within chunks of {torn[0]} tokens, which must be whole blocks"
        raise ValueError(f"block_size={config.block_size}: {problem}")
    kept = {_kept(config, model, shape, max_len) for model in models for shape in model.kv_groups}
    if not kept - {0}:
        return list(models)
    found = sorted(kept, key=lambda tokens: tokens or sys.maxsize, reverse=True)[:MAX_KV_GROUPS]
    first = _whole(config, max_len) if found[0] == 0 else _window_blocks(config, found[0])
    retentions = tuple(_retention(config, tokens, max_len, first if i else 0) for i, tokens in enumerate(found))

    def table(model: Keeping, shape: KVShape) -> int:
        own = _kept(config, model, shape, max_len)
        return max(i for i, tokens in enumerate(found) if not tokens or (own and tokens >= own))

    return [
        replace(
            model,
            kv_groups=tuple(replace(shape, table=table(model, shape)) for shape in model.kv_groups),
            retentions=retentions,
        )
        for model in models
    ]


def bytes_of_row(shapes: Sequence[KVShape], retentions: Sequence[Retention], num_tokens: int, block_size: int) -> int:
    """Bytes of K and V of a decoding row with `num_tokens` tokens."""
    whole = -(-num_tokens // block_size)
    return sum(
        shape.bytes_per_block(block_size) * (min(whole, -(-one.kept // block_size) + 2) if one.kept else whole)
        for shape, one in ((shape, retentions[shape.table]) for shape in shapes)
    )


class Kept(NamedTuple):
    """What models that serve together keep of tokens, and the block size."""

    shapes: Sequence[KVShape]
    retentions: Sequence[Retention]
    block_size: int

    def row_blocks(self, num_tokens: int) -> int:
        """Blocks of the first table for a row of `num_tokens` tokens."""
        return min(-(-num_tokens // self.block_size), self.retentions[0].row_blocks)

    def blocks_in(self, usable: int, spare: int = 0) -> int:
        """The most blocks of the first table such that all tables, each with `spare` more, fit into `usable` bytes."""
        sizes = self._block_sizes()
        left = usable - spare * sum(sizes)
        return bisect_right(range(max(0, left) // max(1, sizes[0]) + 1), left, key=self.bytes_of) - 1

    def bytes_of(self, blocks: int) -> int:
        """Bytes of all tables if the first has so many blocks."""
        sizes = self._block_sizes()
        return sum(size * one.num_blocks(blocks) for size, one in zip(sizes, self.retentions, strict=True))

    def _block_sizes(self) -> list[int]:
        """Bytes of a block of each table, in all models."""
        sizes = [0] * len(self.retentions)
        for shape in self.shapes:
            sizes[shape.table] += shape.bytes_per_block(self.block_size)
        return sizes


def context_cost(model: Keeping, block_size: int) -> str:
    """What the longest context of a `settled` model takes, in words."""
    taken, all_kept = (
        bytes_of_row(model.kv_groups, kept, model.max_model_len, block_size)
        for kept in (model.retentions, KEEP_ALL * len(model.retentions))
    )
    said = f"a context of {model.max_model_len} tokens takes {taken / 2**20:.1f} MiB"
    if taken == all_kept:
        return said
    kept = Kept(model.kv_groups, model.retentions, block_size)
    least = kept.bytes_of(kept.row_blocks(model.max_model_len))
    share = f"{taken / all_kept:.0%} of what it would take if every layer kept all tokens"
    return f"{said}, {share}; a cache for one, with chunks of its prompt, takes {least / 2**20:.1f} MiB"


def _kept(config: WorkerConfig, model: Keeping, shape: KVShape, max_len: int) -> int:
    """Tokens kept; 0 means all, also where a window would save next to nothing."""
    if shape.window is None or config.kv_retention == "all":
        return 0
    kept = shape.window + model.ops.lookback
    return kept if kept + _in_flight(config) + 2 * config.block_size < max_len else 0


def _in_flight(config: WorkerConfig) -> int:
    """Tokens of one row."""
    return max(MAX_STEPS_IN_FLIGHT, STEPS_IN_FLIGHT * min(CHUNK_TOKENS, config.max_tokens_per_step))


def _whole(config: WorkerConfig, num_tokens: int) -> int:
    return -(-num_tokens // config.block_size)


def _window_blocks(config: WorkerConfig, kept: int) -> int:
    """Blocks of a decoding row."""
    return _whole(config, kept) + 2


def _retention(config: WorkerConfig, kept: int, max_len: int, first_row: int) -> Retention:
    """`first_row`: blocks of a row of the longest length in the first table; 0: this is the first."""
    if not kept:
        return Retention()
    own, in_flight = _window_blocks(config, kept), _whole(config, _in_flight(config))
    if not first_row:
        return Retention(kept=kept, row_blocks=own + in_flight)
    mean = min(_whole(config, min(max_len, MEAN_WINDOWS * kept)), first_row)
    return Retention(
        kept=kept,
        row_blocks=own + in_flight,
        first=first_row,
        extra=own + in_flight,
        share=min(1.0, own / mean),
        most=config.max_rows * own + in_flight,
    )
