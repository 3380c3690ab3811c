"""The KV cache as a worker holds it: one tensor per layer, blocks outermost, tokens of a block side by side.

Layers that store the same KV shape form a *group*. Each group has a cache of its own; nearly all models have a single
group. Groups that retain the same tokens share one of a row's block tables; see `loading.retention`.

    layers[l]   [num_blocks + 1, block_size, P, Hkv, D]     P planes: K, then V; one if the key is also the value

A token's K and V are one contiguous line, so a step writes both with one indexed copy, and one indexed read returns a
row's blocks as [tokens, P, Hkv, D]. The last block belongs to no row: it stays zero and pads the block tables.

A quantised cache stores K and V as integers with one scale per token and head (`quantize`), and attention computes with
their dequantised values (`dequantize`). This defines the result for every back end; a back end may round the other
operand of each product, but no more coarsely than bfloat16 would where it matters.

    scales[l]   [num_blocks + 1, block_size, P, Hkv]        float32

Masked positions are multiplied by exactly zero, which hides stale numbers but not stale NaN. The blocks of a row that
computed NaN are therefore quarantined: they are zeroed before another row writes its first token into them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pagoda_worker.rows.batch import Batch

LEVELS = 127.0  # the largest integer; its negative is the smallest
SCALE_DTYPE = torch.float32


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """The shape of one token's K and V in the layers of one group, all of which are alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of K and V as they are computed
    quantized: bool = False  # stored as int8, see `quantize`
    window: int | None = None  # the most tokens that its layers see; None: all
    chunked: bool = False  # see `AttentionShape`
    table: int = 0  # which of a row's block tables its layers use
    planes: int = 2  # K and V, or 1: K, which is also V

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.int8 if self.quantized else self.dtype

    @property
    def value_heads(self) -> int:
        """The number of value heads stored per token."""
        return self.num_kv_heads * (self.planes - 1)

    @property
    def bytes_per_token(self) -> int:
        scale_bytes = SCALE_DTYPE.itemsize if self.quantized else 0
        lines = self.num_layers * self.planes * self.num_kv_heads
        return lines * (self.head_dim * self.stored_dtype.itemsize + scale_bytes)

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * block_size

    def cells_per_block(self, block_size: int) -> tuple[int, ...]:
        """The shape of one exported block, see `Blocks`; without the last dimension, the shape of its scales."""
        return (self.planes, self.num_layers, self.num_kv_heads, block_size, self.head_dim)


def planes_of(latents: bool, keeps_latents_once: bool) -> int:
    """The number of planes of a layer's cache: 1 if it has latents and the back end stores those once."""
    return 1 if latents and keeps_latents_once else 2


class KVLayer(NamedTuple):
    """Where a layer of a model keeps its K and V: the group, and the layer's index within it."""

    group: int
    layer: int


def grouped(layers: Sequence[KVShape]) -> tuple[tuple[KVShape, ...], list[KVLayer]]:
    """The groups that these layers form (each layer is given as a group of its own), and the place of each layer."""
    counts = Counter(layers)
    kinds = list(counts)
    groups = tuple(replace(kind, num_layers=count) for kind, count in counts.items())
    return groups, [KVLayer(kinds.index(one), layers[:i].count(one)) for i, one in enumerate(layers)]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> int8 [..., D] and their scales [...]: max |x| / 127 over the last dimension, ties to even.

    A line of zeros has scale 0. A line with any non-finite value has scale NaN, so that it dequantises to NaN.
    """
    wide = x.to(SCALE_DTYPE)
    most = torch.full((), LEVELS, dtype=SCALE_DTYPE, device=x.device)  # a tensor: CUDA multiplies by 1 / constant
    scales = torch.where(wide.isfinite().all(-1), wide.abs().amax(-1) / most, torch.nan)
    whole = (wide / scales.unsqueeze(-1)).round_().clamp_(-LEVELS, LEVELS)
    return torch.where(scales.unsqueeze(-1) > 0, whole, 0.0).to(torch.int8), scales


def dequantize(levels: Tensor, scales: Tensor) -> Tensor:
    """levels [..., D] int8, scales [...] -> [..., D] float32"""
    return levels * scales.unsqueeze(-1)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """n blocks outside of any cache, in the same layout for every back end. P planes: see `KVShape`.

    Cells to which no token was written are undefined.
    """

    cells: Tensor  # [n, P, num_layers, Hkv, block_size, D] in the stored dtype
    scales: Tensor | None  # [n, P, num_layers, Hkv, block_size] float32 if quantised

    def check(self, shape: KVShape, block_size: int, num_blocks: int) -> None:
        """Raises ValueError unless these are `num_blocks` blocks of a cache of this shape."""
        sizes = (num_blocks, *shape.cells_per_block(block_size))
        scales = None if self.scales is None else tuple(self.scales.shape)
        fit = scales == (sizes[:-1] if shape.quantized else None)
        if self.cells.shape != sizes or self.cells.dtype != shape.stored_dtype or not fit:
            raise ValueError(
                f"blocks {tuple(self.cells.shape)} of {self.cells.dtype} with scales {scales} "
                f"do not fit a cache that takes {sizes} of {shape.stored_dtype}"
            )


@dataclass
class KVCache:
    """See the module's docstring; `lines` and `blocks` are views of `layers` for indexed writes and reads."""

    shape: KVShape
    num_blocks: int
    block_size: int
    layers: list[Tensor]
    scales: list[Tensor] = field(default_factory=list)  # none unless quantised
    lines: list[Tensor] = field(init=False)  # [(num_blocks + 1) * block_size, P * Hkv * D]
    blocks: list[Tensor] = field(init=False)  # [num_blocks + 1, block_size * P * Hkv * D]
    quarantined: set[int] = field(default_factory=set)
    _gathered: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lines = [layer.flatten(2).flatten(0, 1) for layer in self.layers]
        self.blocks = [layer.flatten(1) for layer in self.layers]
        self._gathered = self.blocks[0].new_empty((0, self.blocks[0].shape[1]), dtype=self.shape.dtype)

    @property
    def _tensors(self) -> list[Tensor]:
        """All tensors that hold data of blocks, [num_blocks + 1, ...] each."""
        return [*self.layers, *self.scales]

    def write(self, layer: int, places: Tensor, lines: Tensor) -> None:
        """Write lines [T, P * Hkv * D], K before V, to token places `places` [T] of the cache."""
        if self.shape.quantized:
            levels, scales = quantize(lines.view(len(lines), -1, self.shape.head_dim))
            self.scales[layer].flatten(2).flatten(0, 1).index_copy_(0, places, scales)
            lines = levels.flatten(1)
        self.lines[layer].index_copy_(0, places, lines)

    def read(self, layer: int, block_ids: Tensor) -> Tensor:
        """K and V of blocks [n, block_size, 2, Hkv, D] as stored, or dequantised to at least float32."""
        cells = self.layers[layer][block_ids]
        if self.shape.quantized:
            wide = torch.promote_types(self.shape.dtype, SCALE_DTYPE)
            cells = dequantize(cells, self.scales[layer][block_ids]).to(wide)
        return cells.expand(-1, -1, 2, -1, -1)

    def gather(self, layer: int, block_ids: Tensor) -> Tensor:
        """K and V of blocks [n, block_size, 2, Hkv, D], copied in the run dtype, valid until the next call.

        All calls share one buffer that lives as long as the cache: the operating system would have to map fresh memory
        of this size page by page in every layer.
        """
        if len(self._gathered) < len(block_ids):
            self._gathered = self._gathered.new_empty((len(block_ids), self._gathered.shape[1]))
        out = self._gathered[: len(block_ids)]
        cells = out.view(len(out), *self.layers[layer].shape[1:])
        if self.shape.quantized:
            levels = self.layers[layer].index_select(0, block_ids)
            torch.mul(levels, self.scales[layer].index_select(0, block_ids).unsqueeze(-1), out=cells)
        else:
            torch.index_select(self.blocks[layer], 0, block_ids, out=out)
        return cells.expand(-1, -1, 2, -1, -1)

    @property
    def empty_block(self) -> int:
        """The id of the block of zeros."""
        return self.num_blocks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Every source is read before any destination is written."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self.layers[0].device).unbind(1)
        for tensor in self._tensors:
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))
        bad = {destination for source, destination in pairs if source in self.quarantined}
        self.quarantined.difference_update(destination for _, destination in pairs)
        self.quarantined |= bad

    def export_blocks(self, block_ids: Sequence[int]) -> Blocks:
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.layers[0].device)

        def tokens_inside(tensors: list[Tensor]) -> Tensor:
            """[n, block_size, P, Hkv, ...] per layer -> [n, P, num_layers, Hkv, block_size, ...]"""
            return torch.stack([tensor[ids].moveaxis(1, 3) for tensor in tensors], 2)

        scales = tokens_inside(self.scales) if self.shape.quantized else None
        return Blocks(cells=tokens_inside(self.layers), scales=scales)

    def import_blocks(self, block_ids: Sequence[int], blocks: Blocks) -> None:
        """Blocks with any non-finite value are quarantined, as if they had been computed here."""
        blocks.check(self.shape, self.block_size, len(block_ids))
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.layers[0].device)
        for index, layer in enumerate(self.layers):
            layer[ids] = blocks.cells[:, :, index].to(layer.device).moveaxis(3, 1)
        numbers = blocks.cells
        if blocks.scales is not None:
            numbers = blocks.scales
            for index, layer in enumerate(self.scales):
                layer[ids] = blocks.scales[:, :, index].to(layer.device).moveaxis(3, 1)
        finite = numbers.isfinite().flatten(1).all(1).tolist()
        self.quarantined.difference_update(block_ids)
        self.quarantined.update(block for block, good in zip(block_ids, finite, strict=True) if not good)

    def admit(self, batch: Batch) -> None:
        """Before a step computes: clean the quarantined blocks whose first token it is about to write."""
        if not self.quarantined:
            return
        blocks, offsets = batch.kv_indices // self.block_size, batch.kv_indices % self.block_size
        for block in self.quarantined & set(blocks[offsets == 0].tolist()):
            for tensor in self._tensors:
                tensor[block].zero_()
            self.quarantined.discard(block)

    def inspect(self, batch: Batch, hidden: Tensor) -> None:
        """After a step: quarantine the blocks of tokens with a non-finite value in their hidden state [T, H]."""
        finite = hidden.isfinite()
        if not finite.all():
            bad = batch.kv_indices[~finite.all(-1)] // self.block_size
            self.quarantined.update(bad.tolist())


def new_kv_cache(shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
    size = (num_blocks + 1, block_size, shape.planes, shape.num_kv_heads, shape.head_dim)

    def layers(size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

    scales = layers(size[:-1], SCALE_DTYPE) if shape.quantized else []
    return KVCache(
        shape=shape,
        num_blocks=num_blocks,
        block_size=block_size,
        layers=layers(size, shape.stored_dtype),
        scales=scales,
    )
