"""Moves of whole blocks: within a cache, out of it into host memory, and back.

Swap blocks lie in host memory in the layout shared by all back ends, each contiguous and, with a device, pinned. So a
swap is one gather on the device and one transfer per block, queued in order with the device's other work: the host
waits for none of it, and the steps that follow find their blocks in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.kernels.kv_cache import SCALE_DTYPE, Blocks, KVShape
from pagoda_worker.loading.memory import NotEnoughMemory
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.step.table import Pairs

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]

STAGED_BYTES = 64 * 2**20  # of blocks in transit, staged on the device
PIECE_BYTES = 2**30  # of host memory per allocation: pinned memory is rounded up to powers of two
MEASURED_BLOCKS = 8


class SwapSpace:
    """Host memory for blocks of one cache `kv` of this shape. Pairs use the group's own numbering.

    Raises:
        NotEnoughMemory: the host lacks this much memory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        shape: KVShape,
        kv: Any,
        block_size: int,
        num_swap_blocks: int,
        accelerator: Accelerator | None,
    ) -> None:
        self._ops, self._device, self._kv = loaded.ops, loaded.device, kv
        self._shape, self._block_size = shape, block_size
        self._blocks_at_once = max(1, STAGED_BYTES // self._shape.bytes_per_block(block_size))
        allocate = _pageable if accelerator is None else accelerator.pinned
        cells = self._shape.cells_per_block(block_size)
        try:
            self._cells = _apart(num_swap_blocks, cells, self._shape.stored_dtype, allocate)
            num_scales = num_swap_blocks if self._shape.quantized else 0
            self._scales = _apart(num_scales, cells[:-1], SCALE_DTYPE, allocate)
        except RuntimeError as error:
            raise NotEnoughMemory(
                f"swap_space_gib: cannot allocate {num_swap_blocks} blocks of host memory: {error}"
            ) from error

    def swap_out(self, pairs: Pairs) -> None:
        for part in self._parts(pairs):
            blocks = self._ops.export_blocks(self._kv, [block for block, _ in part])
            for index, (_, swap_block) in enumerate(part):
                self._cells[swap_block].copy_(blocks.cells[index], non_blocking=True)
                if blocks.scales is not None:
                    self._scales[swap_block].copy_(blocks.scales[index], non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        for part in self._parts(pairs):
            blocks = _staged(len(part), self._shape, self._block_size, self._device)
            for index, (swap_block, _) in enumerate(part):
                blocks.cells[index].copy_(self._cells[swap_block], non_blocking=True)
                if blocks.scales is not None:
                    blocks.scales[index].copy_(self._scales[swap_block], non_blocking=True)
            self._ops.import_blocks(self._kv, [block for _, block in part], blocks)

    def _parts(self, pairs: Pairs) -> list[Pairs]:
        return [pairs[start : start + self._blocks_at_once] for start in range(0, len(pairs), self._blocks_at_once)]


class BlockMover:
    """Moves blocks in all caches of a worker; caches that use the same table share block ids and move alike.

    Pairs are as in StepPlan. `caches` are the models, each with its KV cache from `LoadedModel.new_kv_cache`; `blocks`
    and `swap_blocks` are the ids of each table.
    """

    def __init__(
        self,
        caches: Sequence[tuple[LoadedModel, Sequence[Any]]],
        block_size: int,
        blocks: Sequence[range],
        swap_blocks: Sequence[range],
        accelerator: Accelerator | None,
    ) -> None:
        groups = [(loaded, *pair) for loaded, kv in caches for pair in zip(loaded.kv_groups, kv, strict=True)]
        self._caches = [(shape.table, loaded.ops, kv) for loaded, shape, kv in groups]
        self._accelerator = accelerator
        self._blocks, self._swap_blocks = blocks, swap_blocks
        self._spaces = [
            (shape.table, SwapSpace(loaded, shape, kv, block_size, len(swap_blocks[shape.table]), accelerator))
            for loaded, shape, kv in groups
            if swap_blocks[shape.table]
        ]

    def copy(self, pairs: Pairs) -> None:
        moved = _by_table(pairs, self._blocks, self._blocks)
        for table, ops, kv in self._caches:
            if moved[table]:
                ops.copy_blocks(kv, moved[table])

    def swap_out(self, pairs: Pairs) -> None:
        moved = _by_table(pairs, self._blocks, self._swap_blocks)
        for table, space in self._spaces:
            space.swap_out(moved[table])

    def swap_in(self, pairs: Pairs) -> None:
        moved = _by_table(pairs, self._swap_blocks, self._blocks)
        for table, space in self._spaces:
            space.swap_in(moved[table])

    def seconds_per_block(self, table: int) -> float:
        """Seconds to move one block out or in, measured on blocks not yet in use; 0.0 without swap space.

        The second of two rounds counts: the first one touches the memory for the first time.
        """
        pairs = list(zip(self._blocks[table], self._swap_blocks[table], strict=False))[:MEASURED_BLOCKS]
        back, count = [(swap_block, block) for block, swap_block in pairs], len(pairs)
        took = 0.0
        for _ in range(2 if count else 0):
            began = self._settled()
            with torch.inference_mode():
                self.swap_out(pairs)
                self.swap_in(back)
            took = (self._settled() - began) / (2 * count)
        return took

    def _settled(self) -> float:
        """The time when all work queued on the device is done."""
        if self._accelerator is not None:
            self._accelerator.synchronize()
        return time.perf_counter()


def _by_table(pairs: Pairs, sources: Sequence[range], targets: Sequence[range]) -> list[Pairs]:
    """For each table, its pairs in its group's own numbering."""
    if len(sources) == 1 or not pairs:
        return [pairs] * len(sources)
    return [
        [(one - source.start, other - target.start) for one, other in pairs if one in source]
        for source, target in zip(sources, targets, strict=True)
    ]


def _pageable(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(size), dtype=dtype)


def _apart(count: int, size: tuple[int, ...], dtype: torch.dtype, allocate: Allocate) -> list[torch.Tensor]:
    """`count` tensors of this size, from few allocations."""
    piece = max(1, PIECE_BYTES // (dtype.itemsize * torch.Size(size).numel()))
    starts = range(0, count, piece)
    return [one for start in starts for one in allocate((min(piece, count - start), *size), dtype).unbind()]


def _staged(count: int, shape: KVShape, block_size: int, device: torch.device) -> Blocks:
    sizes = (count, *shape.cells_per_block(block_size))
    scales = torch.empty(sizes[:-1], dtype=SCALE_DTYPE, device=device) if shape.quantized else None
    return Blocks(cells=torch.empty(sizes, dtype=shape.stored_dtype, device=device), scales=scales)
