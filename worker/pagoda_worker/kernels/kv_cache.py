"""The KV cache as a worker holds it: one tensor per layer, blocks outermost, tokens of a block side by side.

    layers[l]   [num_blocks + 1, block_size, 2, Hkv, D]     2: K, then V

A token's K and V are one contiguous line, so a step writes both with one indexed copy and a row's blocks come out of
one indexed read as [tokens, 2, Hkv, D]. The last block is nobody's: it stays zero and pads the block tables.

Masked positions are multiplied by exactly zero, which hides stale numbers but not stale NaN. A row that computed NaN
therefore quarantines its blocks: they are zeroed before another row writes its first token into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagoda_worker.batch import Batch


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What one token's K and V need: the same in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * block_size


@dataclass
class KVCache:
    """See the module's docstring; `lines` and `blocks` are views of `layers` for indexed writes and reads."""

    shape: KVShape
    num_blocks: int
    block_size: int
    layers: list[torch.Tensor]
    lines: list[torch.Tensor] = field(init=False)  # [(num_blocks + 1) * block_size, 2 * Hkv * D]
    blocks: list[torch.Tensor] = field(init=False)  # [num_blocks + 1, block_size * 2 * Hkv * D]
    quarantined: set[int] = field(default_factory=set)
    _gathered: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lines = [layer.flatten(2).flatten(0, 1) for layer in self.layers]
        self.blocks = [layer.flatten(1) for layer in self.layers]
        self._gathered = self.blocks[0].new_empty((0, self.blocks[0].shape[1]))

    def gather(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Copies of blocks [n, block_size * 2 * Hkv * D], valid until the next call.

        They share one buffer that lives as long as the cache: fresh memory of this size would come from the kernel,
        page by page, in every layer.
        """
        if len(self._gathered) < len(block_ids):
            self._gathered = self._gathered.new_empty((len(block_ids), self._gathered.shape[1]))
        return torch.index_select(self.blocks[layer], 0, block_ids, out=self._gathered[: len(block_ids)])

    @property
    def empty_block(self) -> int:
        """The id of the block of zeros."""
        return self.num_blocks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Every source is read before any destination is written."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self.layers[0].device).unbind(1)
        for blocks in self.blocks:
            blocks.index_copy_(0, destinations, blocks.index_select(0, sources))
        for source, destination in pairs:
            move = self.quarantined.add if source in self.quarantined else self.quarantined.discard
            move(destination)

    def admit(self, batch: Batch) -> None:
        """Before a step computes: clean the quarantined blocks whose first token it is about to write."""
        if not self.quarantined:
            return
        blocks, offsets = batch.kv_indices // self.block_size, batch.kv_indices % self.block_size
        for block in self.quarantined & set(blocks[offsets == 0].tolist()):
            for layer in self.layers:
                layer[block].zero_()
            self.quarantined.discard(block)

    def inspect(self, batch: Batch, hidden: torch.Tensor) -> None:
        """After a step: quarantine the blocks in which a token with a hidden state [T, H] that is no number lies."""
        finite = hidden.isfinite()
        if not finite.all():
            bad = batch.kv_indices[~finite.all(-1)] // self.block_size
            self.quarantined.update(bad.tolist())


def new_kv_cache(shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
    size = (num_blocks + 1, block_size, 2, shape.num_kv_heads, shape.head_dim)
    layers = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
    return KVCache(shape=shape, num_blocks=num_blocks, block_size=block_size, layers=layers)
