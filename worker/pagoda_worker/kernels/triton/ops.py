"""The `triton` back end for CUDA devices: kernels compiled by Triton on first use, and products by cuBLASLt through
torch, except those of experts.

CPU tensors are accepted only if Triton interprets its kernels, which is how they are tested without a device.

A packed linear layer is opaque to its users: quantised layers will be further types with their own `linear`, and layers
whose (N, K) cuBLASLt does not compute alike for every number of rows will use a Triton product with fixed tiles. Until
then a row's bits may depend on the number of rows in its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from pagoda_worker.kernels.kv_cache import Blocks, KVShape
from pagoda_worker.kernels.ops import (
    Added,
    AttentionShape,
    BackendError,
    Expert,
    Forward,
    HeadNorm,
    Rotation,
)
from pagoda_worker.kernels.quantized import QuantizedWeight, Weight, dequantize, quantize
from pagoda_worker.kernels.reference import activated, latent_lines
from pagoda_worker.kernels.routing import Beside, Routing, choose
from pagoda_worker.kernels.triton import low_rank, pointwise
from pagoda_worker.kernels.triton.attention import SPLIT, TILE
from pagoda_worker.kernels.triton.device_sampler import TritonSampler
from pagoda_worker.kernels.triton.experts import DEPTH, PackedExperts, through_experts
from pagoda_worker.kernels.triton.low_rank import LowSlots
from pagoda_worker.kernels.triton.plan import Plan, Tiles, attend, make_plan
from pagoda_worker.rows.batch import Batch
from pagoda_worker.sampling import logprobs, sampler
from pagoda_worker.sampling.device_sampler import Upload

BIDIRECTIONAL = "triton supports causal attention only"
PLAIN_CACHE = "triton does not support an int8 KV cache"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Packed(NamedTuple):
    """A linear layer in the form that torch takes."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class TritonKVCache:
    """One head's tile of keys is one contiguous read. Layers are slices of one tensor, so a block copy is one call."""

    shape: KVShape
    num_blocks: int
    block_size: int
    storage: Tensor = field(repr=False)  # [num_layers, P, num_blocks, Hkv, block_size, D]; P: see KVShape.planes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [num_blocks, Hkv, block_size, D] each; both are the same tensor if there is one plane."""
        return self.storage[index, 0], self.storage[index, -1]

    def admit(self, batch: Batch) -> None:
        """Nothing to clean: kernels never read a cell that was not written since its block was allocated."""

    def inspect(self, batch: Batch, hidden: Tensor) -> None:
        """See `admit`."""


class TritonOps:
    name = "triton"
    capturable = True
    lookback = TILE - 1
    batch_invariant = False  # cuBLASLt chooses a kernel by the number of rows
    own_threads = False
    integer_linear = False
    keeps_latents_once = True

    def __init__(
        self, device: torch.device, tiles: Tiles, dtype: torch.dtype = torch.float32, cuts_show: bool = False
    ) -> None:
        """`dtype`: to which quantised weights are converted; `cuts_show`: how a prompt is cut changes the bits of
        attention or experts."""
        self.device = device
        self.tiles = tiles
        self.cuts_show = cuts_show
        self._dtype = dtype

    @property
    def numerics(self) -> str:
        cuts = " cuts show" if self.cuts_show else ""
        attention = f"attention {SPLIT} {TILE} {self.tiles.low} {self.tiles.high}{cuts}"
        adapters = f"adapters {low_rank.SPLITS} {low_rank.PIECE}"
        return f"triton {triton.__version__} {attention} experts {DEPTH} {adapters}"

    def with_tiles(self, tiles: Tiles, cuts_show: bool = False) -> TritonOps:
        """The same back end with other tiles."""
        other = copy(self)
        other.tiles, other.cuts_show = tiles, cuts_show
        return other

    quantize = staticmethod(quantize)

    def pack_linear(self, weight: Weight, bias: Tensor | None = None, segments: int = 1) -> Packed:
        """Sums in one piece, ignoring `segments`: cuBLASLt uses another order for every shard size anyway."""
        if isinstance(weight, QuantizedWeight):
            weight = dequantize(weight).to(self._dtype)
        return Packed(weight.contiguous(), bias)

    pack_gated = pack_linear

    def new_slots(self, packed: Packed, count: int, rank: int, *, gated: bool = False) -> LowSlots:
        return low_rank.new_slots(packed.weight, count, rank)

    def slot_bytes(self, inputs: int, outputs: Sequence[int], ranks: Sequence[int]) -> int:
        return low_rank.slot_bytes(inputs, sum(outputs), sum(ranks), self._dtype)

    fill_slot = staticmethod(low_rank.fill_slot)

    def linear(self, x: Tensor, packed: Packed, added: Added | None = None) -> Tensor:
        """The adapters' part is added after the layer's own rounding."""
        y = F.linear(x, packed.weight, packed.bias)
        if added is not None:
            low_rank.add(y, x.contiguous(), added.slots, added.tokens.there)
        return y

    def gated_linear(self, x: Tensor, packed: Packed, activation: str, added: Added | None = None) -> Tensor:
        return pointwise.act_mul(self.linear(x, packed, added), activation)

    def activated_linear(self, x: Tensor, packed: Packed, activation: str, added: Added | None = None) -> Tensor:
        return activated(self.linear(x, packed, added), activation)

    def pack_experts(self, experts: Iterable[Expert], count: int, favour: Tensor | None = None) -> PackedExperts:
        ups, downs = [], []
        for one in experts:
            ups.append(self.pack_gated(one.gate_up, one.gate_up_bias))
            downs.append(self.pack_linear(one.down, one.down_bias))
        return PackedExperts(
            torch.stack([one.weight for one in ups]), torch.stack([one.weight for one in downs]),
            _stacked(ups), _stacked(downs), favour,
        )  # fmt: skip

    def moe(
        self,
        x: Tensor,
        logits: Tensor,
        packed: PackedExperts,
        routing: Routing,
        activation: str,
        beside: Beside | None = None,
    ) -> Tensor:
        """The host does not see which experts are chosen, so this can be recorded."""
        return through_experts(x, choose(logits, routing, packed.favour), packed, activation, beside, self.tiles)

    def pack_heads(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def head_linear(self, x: Tensor, packed: Tensor) -> Tensor:
        heads = x.view(len(x), len(packed), -1).transpose(0, 1)
        return torch.bmm(heads, packed.mT).transpose(0, 1).flatten(1)

    def logits(
        self, hidden: Tensor, packed: Packed, softcap: float | None = None, added: Added | None = None
    ) -> Tensor:
        logits = self.linear(hidden, packed, added)
        return logits if softcap is None else logits.float().div_(softcap).tanh_().mul_(softcap)

    embed = staticmethod(pointwise.embed)
    rms_norm = staticmethod(pointwise.rms_norm)
    add_rms_norm = staticmethod(pointwise.add_rms_norm)
    layer_norm = staticmethod(pointwise.layer_norm)
    add_layer_norm = staticmethod(pointwise.add_layer_norm)

    def add_positions(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        return x.add_(table.index_select(0, positions))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y.add_(x)

    def rope_write(
        self,
        qkv: Tensor,
        rotation: Rotation | None,
        norm: HeadNorm | None,
        kv: TritonKVCache,
        layer: int,
        kv_indices: Tensor,
    ) -> Tensor:
        return pointwise.rope_write(qkv, rotation, norm, kv.storage[layer], kv_indices)

    def latent_write(
        self,
        query: Tensor,
        latent: Tensor,
        turning: Tensor,
        rotation: Rotation | None,
        kv: TritonKVCache,
        layer: int,
        kv_indices: Tensor,
    ) -> Tensor:
        lines = latent_lines(query, latent, turning, kv.shape.planes)
        return self.rope_write(lines, rotation, None, kv, layer, kv_indices)

    def write_kv(self, key: Tensor, value: Tensor, kv: TritonKVCache, layer: int, kv_indices: Tensor) -> None:
        blocks, offsets = kv_indices // kv.block_size, kv_indices % kv.block_size
        for cache, part in zip(kv.storage[layer], (key, value), strict=False):
            cache[blocks, :, offsets] = part.to(cache.dtype)

    def plan(self, batch: Batch, kv: TritonKVCache) -> Plan:
        return make_plan(batch, self.tiles, kv.shape.dtype)

    def attend(
        self,
        query: Tensor,
        kv: TritonKVCache,
        layer: int,
        plan: Plan,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Raises BackendError for what only encoders need."""
        if bias is not None or not shape.causal:
            raise BackendError(f"kernels: {BIDIRECTIONAL}")
        return attend(query, kv.layer(layer), plan, shape, sinks)

    def record(self, forward: Forward, kv: Sequence[TritonKVCache], max_tokens: int) -> None:
        return None

    def new_kv_cache(self, shape: KVShape, num_blocks: int, block_size: int) -> TritonKVCache:
        if shape.quantized:
            raise BackendError(f"kernels: {PLAIN_CACHE}")
        if block_size % 16:
            raise BackendError(f"kernels: triton needs a block_size that is a multiple of 16, got {block_size}")
        size = (shape.num_layers, shape.planes, num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        storage = torch.zeros(size, dtype=shape.dtype, device=self.device)
        return TritonKVCache(shape, num_blocks, block_size, storage)

    def copy_blocks(self, kv: TritonKVCache, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            sources, destinations = self._ids(pairs).unbind(1)
            kv.storage.index_copy_(2, destinations, kv.storage.index_select(2, sources))

    def export_blocks(self, kv: TritonKVCache, block_ids: Sequence[int]) -> Blocks:
        cells = kv.storage.permute(2, 1, 0, 3, 4, 5).index_select(0, self._ids(block_ids))
        return Blocks(cells=cells, scales=None)

    def import_blocks(self, kv: TritonKVCache, block_ids: Sequence[int], blocks: Blocks) -> None:
        blocks.check(kv.shape, kv.block_size, len(block_ids))
        kv.storage.index_copy_(2, self._ids(block_ids), blocks.cells.to(self.device).permute(2, 1, 0, 3, 4, 5))

    def _ids(self, values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        """Block ids on the device, copied without making the host wait."""
        ids = torch.tensor(values, dtype=torch.int64)
        return ids if self.device.type == "cpu" else ids.pin_memory().to(self.device, non_blocking=True)

    sample = staticmethod(sampler.sample)
    report = staticmethod(logprobs.report)

    def device_sampler(self, max_rows: int, vocab_size: int, upload: Upload) -> TritonSampler:
        return TritonSampler(max_rows, vocab_size, self.device, upload)


def _stacked(packed: Sequence[Packed]) -> Tensor | None:
    """Their biases [E, N]; either all have one or none has."""
    biases = [one.bias for one in packed if one.bias is not None]
    return torch.stack(biases) if biases else None


def interpreted() -> bool:
    """Whether this process runs Triton's kernels in its interpreter, on any device."""
    return bool(triton.knobs.runtime.interpret)
