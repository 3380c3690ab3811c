"""The KV cache of the native kernels, and the conversion between its layouts and the one all back ends share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.cpu.operations import LayerCache
from pagoda_worker.kernels.kv_cache import SCALE_DTYPE, Blocks, KVShape
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.rows.batch import Batch

GROUP = 16  # tokens that are stored side by side; see csrc/attention_cells.h
MAX_QUANTIZED_DIM = 256  # sums of more products would overflow
QUANTIZED_DIMS = f"native supports an int8 KV cache for heads of up to {MAX_QUANTIZED_DIM} dimensions"
WORD_BYTES = 4  # of neighbouring dimensions of a key, or tokens of a value


@dataclass(frozen=True)
class NativeKVCache:
    """The cache by plane and layer, in the layouts of csrc/attention_cells.h. Block ids have their usual meaning.

    The planes are keys and values, or only keys, which are then also the values: see `KVShape.planes`.
    """

    shape: KVShape
    num_blocks: int
    block_size: int
    cells: list[list[torch.Tensor]] = field(repr=False)  # [num_blocks, Hkv * block_size * D] in the stored dtype
    scales: list[list[torch.Tensor]] = field(repr=False)  # [num_blocks, Hkv * block_size] float32, if quantised

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that hold data of blocks, [num_blocks, ...] each."""
        return [layer for plane in (*self.cells, *self.scales) for layer in plane]

    def layer(self, index: int, table: int) -> LayerCache:
        """`table`: which of the step's tables is this group's."""
        return LayerCache(
            keys=self.cells[0][index],
            values=self.cells[1][index] if self.shape.planes == 2 else None,
            k_scales=self.scales[0][index] if self.scales else None,
            v_scales=self.scales[1][index] if self.scales and self.shape.planes == 2 else None,
            heads=self.shape.num_kv_heads,
            dim=self.shape.head_dim,
            block_size=self.block_size,
            table=table,
        )

    def admit(self, batch: Batch) -> None:
        """Nothing to clean: kernels never read a cell that was not written since its block was allocated."""

    def inspect(self, batch: Batch, hidden: torch.Tensor) -> None:
        """See `admit`."""


def new_native_cache(shape: KVShape, num_blocks: int, block_size: int) -> NativeKVCache:
    if shape.quantized and shape.head_dim > MAX_QUANTIZED_DIM:
        raise BackendError(f"kernels: {QUANTIZED_DIMS}, not {shape.head_dim}")
    tokens = shape.num_kv_heads * block_size

    def planes(width: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        layers = range(shape.num_layers)
        return [[lib.pages(num_blocks, width, dtype=dtype) for _ in layers] for _ in range(shape.planes)]

    cells = planes(tokens * shape.head_dim, shape.stored_dtype)
    return NativeKVCache(shape, num_blocks, block_size, cells, planes(tokens, SCALE_DTYPE) if shape.quantized else [])


def export_blocks(kv: NativeKVCache, block_ids: Sequence[int]) -> Blocks:
    ids = torch.tensor(block_ids, dtype=torch.int64)

    def cells(layers: list[torch.Tensor], layout: _Layout) -> torch.Tensor:
        return torch.stack([layout.unfold(layer[ids]) for layer in layers], 1)

    def scales(layers: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([layer[ids].view(len(ids), kv.shape.num_kv_heads, kv.block_size) for layer in layers], 1)

    size = (len(ids), -1, kv.shape.num_kv_heads, kv.block_size, kv.shape.head_dim)
    layouts = _layouts(kv.shape, kv.block_size)
    planes = [cells(plane, layout).view(size) for plane, layout in zip(kv.cells, layouts, strict=False)]
    quantized = torch.stack([scales(plane) for plane in kv.scales], 1) if kv.shape.quantized else None
    return Blocks(cells=torch.stack(planes, 1), scales=quantized)


def import_blocks(kv: NativeKVCache, block_ids: Sequence[int], blocks: Blocks) -> None:
    blocks.check(kv.shape, kv.block_size, len(block_ids))
    ids = torch.tensor(block_ids, dtype=torch.int64)
    for plane, (layers, layout) in enumerate(zip(kv.cells, _layouts(kv.shape, kv.block_size), strict=False)):
        for index, layer in enumerate(layers):
            layer[ids] = layout.fold(blocks.cells[:, plane, index])
    if blocks.scales is not None:
        for plane, layers in enumerate(kv.scales):
            for index, layer in enumerate(layers):
                layer[ids] = blocks.scales[:, plane, index].flatten(1)


@dataclass(frozen=True)
class _Layout:
    """The sizes of a stored block; its axes, permuted by `order`, are [Hkv, block_size, D]."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def unfold(self, stored: torch.Tensor) -> torch.Tensor:
        """[n, Hkv * block_size * D] as stored -> [n, Hkv, block_size, D], flattened after n"""
        return stored.view(-1, *self.sizes).permute(0, *(axis + 1 for axis in self.order)).flatten(1)

    def fold(self, tokens: torch.Tensor) -> torch.Tensor:
        """The inverse of `unfold`."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        split = tokens.reshape(-1, *(self.sizes[axis] for axis in self.order))
        return split.permute(0, *(axis + 1 for axis in inverse)).flatten(1)


def _layouts(shape: KVShape, block_size: int) -> tuple[_Layout, _Layout]:
    """The layouts of keys and values."""
    heads, dim, word = shape.num_kv_heads, shape.head_dim, WORD_BYTES // shape.stored_dtype.itemsize
    return (
        _Layout((heads, block_size // GROUP, dim // word, GROUP, word), (0, 1, 3, 2, 4)),
        _Layout((heads, block_size // word, dim, word), (0, 1, 3, 2)),
    )
