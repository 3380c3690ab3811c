"""The `torch` back end: tuned for CPU from operations every torch has, no compiler and no extension needed.

Linear layers run prepacked through oneDNN where it takes the dtype; attention is `paged.PagedAttention`. Elementwise
work is spelled in the few torch calls that cost least per layer: a call costs about as much as a row's arithmetic.

There are no integer kernels here: a quantised weight becomes the run dtype when it is packed, and its layer's input is
taken as it is, also where the format says 8 bits. That costs memory and is nearer to the unquantised model.

What keeps a row's bits its own, measured bit for bit by the tests:
- oneDNN and MKL, told so (`library_choice`), sum every output over all of K in one order, whatever the number of rows;
  float32 with one row is the exception (a matrix-vector routine), so one row is computed as two.
- Reductions run per row and never across threads.
- Elementwise kernels treat the end of a thread's range with scalar code, whose `exp` rounds differently from the vector
  code; `_slabs` cuts the work so that a range ends where a row ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagoda_worker.kernels import paged
from pagoda_worker.kernels.kv_cache import KVCache
from pagoda_worker.kernels.ops import AttentionShape, HeadNorm, Rotation
from pagoda_worker.kernels.paged import PagedAttention, Plan, make_plan
from pagoda_worker.kernels.quantized import QuantizedWeight, Weight, dequantize
from pagoda_worker.kernels.reference import HostOps
from pagoda_worker.kernels.segments import tree_sum
from pagoda_worker.rows.batch import Batch

GRAIN = 32768  # elements of elementwise work per thread, at least
ONE_THREAD = 16384  # no elementwise work of up to this many elements is shared between threads, not even gelu
VECTOR = 64  # elements of the widest unrolled vector step


class Packed(NamedTuple):
    """A linear layer, a weight per segment. `prepacked`: in oneDNN's own layout, which only its operator may read."""

    weights: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    prepacked: bool


class AtenOps(HostOps):
    name = "torch"
    numerics = f"attention {paged.TILE} {paged.SMALL_TILES} {paged.QUERY_SLICE}"

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: what quantised weights become."""
        self.device = device
        self.batch_invariant = device.type == "cpu"  # elsewhere libraries choose a product by its number of rows
        self._dtype = dtype
        self._prepackable = _prepackable(device)

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None = None, segments: int = 1) -> Packed:
        if isinstance(weight, QuantizedWeight):
            weight = dequantize(weight).to(self._dtype)
        prepacked = weight.dtype in self._prepackable
        weights = [part.contiguous() for part in weight.chunk(segments, 1)]
        if prepacked:
            weights = [torch.ops.mkldnn._reorder_linear_weight(part, None) for part in weights]
        return Packed(tuple(weights), bias, prepacked)

    pack_gated = pack_linear

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self._linear(x, packed).to(x.dtype)

    def gated_linear(self, x: torch.Tensor, packed: Packed, activation: str) -> torch.Tensor:
        return act_mul(self.linear(x, packed), activation)

    def logits(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The sum of a segment is in the run dtype, then widened: oneDNN's float32 output for bfloat16 operands is not
        reachable from torch.
        """
        return self._linear(hidden, packed).float()

    def _linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """In the run dtype; in float32 where segments were added."""
        if len(packed.weights) == 1:
            return _product(x, packed.weights[0], packed.bias, packed.prepacked)
        parts = x.view(len(x), len(packed.weights), -1).transpose(0, 1).contiguous()
        sums = [_product(*part, None, packed.prepacked) for part in zip(parts, packed.weights, strict=True)]
        total = tree_sum(torch.stack(sums).float())
        return total if packed.bias is None else total.add_(packed.bias)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor, scale: float | None) -> torch.Tensor:
        x = table.index_select(0, token_ids)
        return x if scale is None else x.mul_(torch.tensor(scale, dtype=x.dtype, device=x.device))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _normed(x.float(), weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def rope_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        kv: KVCache,
        layer: int,
        kv_indices: torch.Tensor,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = kv.shape.num_kv_heads, kv.shape.head_dim
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        turning = heads[:, :-num_kv_heads]
        wide = turning.float()
        if norm is not None:
            wide = _normed(wide, norm.weight, norm.eps)
        turned = (wide * rotation.cos).add_(wide.roll(head_dim // 2, -1).mul_(rotation.sin))
        turning.copy_(turned)
        num_query = heads.shape[1] - 2 * num_kv_heads
        kv.write(layer, kv_indices, qkv[:, num_query * head_dim :])
        return heads[:, :num_query]

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv: KVCache, layer: int, kv_indices: torch.Tensor
    ) -> None:
        kv.write(layer, kv_indices, torch.cat((key.flatten(1), value.flatten(1)), 1))

    def plan(self, batch: Batch, kv: KVCache) -> Plan:
        return make_plan(batch, kv)

    def attend(
        self,
        query: torch.Tensor,
        kv: KVCache,
        layer: int,
        plan: Plan,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return PagedAttention(shape, sinks).attend(query, layer, plan)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, prepacked: bool) -> torch.Tensor:
    if not prepacked:
        return F.linear(x, weight, bias)
    if x.shape[0] == 1 and x.dtype == torch.float32:
        return _product(x.expand(2, -1).contiguous(), weight, bias, prepacked)[:1]
    y: torch.Tensor = _linear_pointwise(x, weight, bias, "none", [], "")
    return y


_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


def _prepackable(device: torch.device) -> tuple[torch.dtype, ...]:
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return ()
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def _normed(wide: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight)


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [T, 2 I] -> act(gate) * up [T, I]"""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    slabs = list(_slabs(num_rows, width, activation)) if gate_up.device.type == "cpu" else [num_rows]
    if len(slabs) == 1:
        return _act_mul(gate_up, width, activation)
    return torch.cat([_act_mul(slab, width, activation) for slab in torch.split(gate_up, slabs)])


def _act_mul(gate_up: torch.Tensor, width: int, activation: str) -> torch.Tensor:
    gate, up = gate_up[:, :width], gate_up[:, width:]
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def _slabs(num_rows: int, width: int, activation: str) -> Iterator[int]:
    """Row counts of pieces that threads do not cut inside a row other than between whole vectors."""
    size = num_rows * width
    threads = torch.get_num_threads()
    if activation == "silu" or size <= ONE_THREAD:  # gelu is shared by all threads as soon as it is shared
        threads = min(threads, -(-size // GRAIN))
    cut = -(-size // max(threads, 1))
    if threads <= 1 or cut % width == 0 or (width % VECTOR == 0 and cut % VECTOR == 0):
        yield num_rows
        return
    rows = max(1, ONE_THREAD // width)
    for start in range(0, num_rows, rows):
        yield min(rows, num_rows - start)
