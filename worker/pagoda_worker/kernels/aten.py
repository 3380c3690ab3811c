"""The `torch` back end: tuned for CPU, built from operations every torch has; it needs no compiler and no extension.

Linear layers run prepacked through oneDNN, in float32 if the processor cannot multiply the weights' dtype: that doubles
their memory, but is several times faster than emulation from two rows on. Attention is `paged.PagedAttention`.
Elementwise work uses as few torch calls per layer as possible: a call costs about as much as a row's arithmetic.

There are no integer kernels here: a quantised weight is converted to the run dtype when it is packed, and the layer's
input is not rounded, even if the format says 8 bits. That costs memory and is closer to the unquantised model.

What makes it batch-invariant (the tests compare bit for bit):
- oneDNN and MKL, so configured (`library_choice`), sum every output over all of K in one order, whatever the number of
  rows; the exception is float32 with one row (a matrix-vector routine), so one row is computed as two. The oneDNN of
  torch 2.11 does not for float32 on AVX2: a probe decides, and MKL multiplies there.
- Reductions run per row and never across threads.
- Elementwise kernels handle the end of a thread's range with scalar code, whose `exp` rounds differently from the
  vector code; `_slabs` cuts the work so that ranges end where rows end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_worker.kernels import paged
from pagoda_worker.kernels.kv_cache import KVCache
from pagoda_worker.kernels.ops import CLAMPED, Added, AttentionShape, HeadNorm, LowRank, Rotation
from pagoda_worker.kernels.paged import PagedAttention, Plan, make_plan
from pagoda_worker.kernels.quantized import QuantizedWeight, Weight, dequantize
from pagoda_worker.kernels.reference import HostOps, activated, add_low_rank, gated
from pagoda_worker.kernels.segments import tree_sum
from pagoda_worker.library_choice import bfloat16_is_native

GRAIN = 32768  # elements of elementwise work per thread, at least
ONE_THREAD = 16384  # elementwise work of up to this many elements is never split between threads, not even gelu
VECTOR = 64  # elements of the widest unrolled vector step


class Packed(NamedTuple):
    """A linear layer, with one weight per segment. `prepacked` weights are in oneDNN's own layout, which only its
    operator may read; `wide` weights are float32 whatever the input is."""

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    prepacked: bool = False
    wide: bool = False


class AtenOps(HostOps):
    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: to which quantised weights are converted."""
        self.device = device
        self._dtype = dtype
        native = _native(device)
        self._prepacks = bool(native) and rows_are_independent(prepacked=True)
        self._native = native if self._prepacks else native[:1]  # MKL multiplies in float32
        # On a GPU, libraries choose a kernel by the number of rows.
        self.batch_invariant = device.type == "cpu" and rows_are_independent(self._prepacks)
        dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in self._native)
        linear = f"linear {dtypes}{'' if self._prepacks else ' not prepacked'}"
        self.numerics = f"attention {paged.TILE} {paged.SMALL_TILES} {paged.QUERY_SLICE}; {linear}; gelu by erf"

    def pack_linear(self, weight: Weight, bias: Tensor | None = None, segments: int = 1) -> Packed:
        if isinstance(weight, QuantizedWeight):
            weight = dequantize(weight).to(self._dtype)
        if wide := bool(self._native) and weight.dtype not in self._native:
            weight, bias = weight.float(), None if bias is None else bias.float()
        parts = weight.chunk(segments, 1)
        if self._prepacks:
            weights = [torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), None) for part in parts]
        else:
            weights = [part.clone(memory_format=torch.contiguous_format) for part in parts]  # no views of a file
        return Packed(tuple(weights), bias, self._prepacks, wide)

    pack_gated = pack_linear

    def fill_slot(self, slots: list[LowRank | None], slot: int, factors: LowRank | None) -> None:
        if factors is not None:
            a, b = (one.to(self.device, torch.float32).contiguous() for one in (factors.a, factors.b))
            if self._prepacks:
                a, b = (torch.ops.mkldnn._reorder_linear_weight(one, None) for one in (a, b))
            factors = factors._replace(a=a, b=b, scales=factors.scales.to(self.device))
        slots[slot] = factors

    def linear(self, x: Tensor, packed: Packed, added: Added | None = None) -> Tensor:
        return self._linear(x, packed, added).to(x.dtype)

    def gated_linear(self, x: Tensor, packed: Packed, activation: str, added: Added | None = None) -> Tensor:
        return act_mul(self.linear(x, packed, added), activation)

    def activated_linear(self, x: Tensor, packed: Packed, activation: str, added: Added | None = None) -> Tensor:
        y = self.linear(x, packed, added)
        width = y.shape[1]
        if activation == "gelu":
            return _gelu(y)
        if width % VECTOR:  # space rows apart, so that vectors end where rows end
            y = F.pad(y, (0, 1))[:, :width]
        return _by_slabs(y, width, activation, lambda part: activated(part, activation))

    def logits(
        self, hidden: Tensor, packed: Packed, softcap: float | None = None, added: Added | None = None
    ) -> Tensor:
        """Computed in the run dtype, then widened: torch does not expose oneDNN's float32 output."""
        logits = self._linear(hidden, packed, added).float()
        return logits if softcap is None else soft_cap(logits, softcap)

    def _linear(self, x: Tensor, packed: Packed, added: Added | None = None) -> Tensor:
        """The result is in the run dtype, like each segment, but in float32 if segments were added."""
        return add_low_rank(x, self._base(x, packed), added, lambda x, w: _product(x, w, None, self._prepacks))

    def _base(self, x: Tensor, packed: Packed) -> Tensor:
        seen = x.float() if packed.wide else x
        if len(packed.weights) == 1:
            return _product(seen, packed.weights[0], packed.bias, packed.prepacked).to(x.dtype)
        parts = seen.view(len(x), len(packed.weights), -1).transpose(0, 1).contiguous()
        sums = [_product(*part, None, packed.prepacked).to(x.dtype) for part in zip(parts, packed.weights, strict=True)]
        total = tree_sum(torch.stack(sums).float())
        return total if packed.bias is None else total.add_(packed.bias)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
        x = table.index_select(0, token_ids)
        return x if scale is None else x.float().mul_(scale).to(x.dtype)

    def add_positions(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        return x.add_(table.index_select(0, positions))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y.add_(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normed(x.float(), weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.layer_norm(total, weight, bias, eps), total

    def rope_write(
        self, qkv: Tensor, rotation: Rotation | None, norm: HeadNorm | None, kv: KVCache, layer: int, kv_indices: Tensor
    ) -> Tensor:
        num_kv_heads, head_dim = kv.shape.num_kv_heads, kv.shape.head_dim
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        turning = heads[:, : heads.shape[1] - kv.shape.value_heads]
        wide = turning.float()
        if norm is not None:
            wide = norm.of(wide, num_kv_heads, _normed)
        if rotation is not None:
            wide = (wide * rotation.cos).add_(wide.roll(head_dim // 2, -1).mul_(rotation.sin))
        turning.copy_(wide)
        num_query = turning.shape[1] - num_kv_heads
        kv.write(layer, kv_indices, qkv[:, num_query * head_dim :])
        return heads[:, :num_query]

    plan = staticmethod(make_plan)

    def attend(  # noqa: PLR0913 - see Ops.attend
        self,
        query: Tensor,
        kv: KVCache,
        layer: int,
        plan: Plan,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        return PagedAttention(shape, sinks, bias).attend(query, layer, plan)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, prepacked: bool) -> Tensor:
    if x.shape[0] == 1 and x.dtype == torch.float32 and x.device.type == "cpu":
        return _product(x.expand(2, -1).contiguous(), weight, bias, prepacked)[:1]
    if not prepacked:
        return F.linear(x, weight, bias)
    y: Tensor = _linear_pointwise(x, weight, bias, "none", [], "")
    return y


_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


@cache
def rows_are_independent(prepacked: bool) -> bool:
    """Whether the bits of a row of a float32 product on this CPU are the same among few rows and among many."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 192, generator=generator) for rows in (40, 330))
    if prepacked:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    whole = _product(x, weight, None, prepacked)
    return all(torch.equal(_product(x[:rows], weight, None, prepacked), whole[:rows]) for rows in (1, 2, 3, 5, 8, 17))


def _native(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that oneDNN multiplies natively; none without oneDNN."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return ()
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported() and bfloat16_is_native()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def _normed(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in place; on a CPU one row at a time, to be batch-invariant."""
    logits.div_(cap)
    for part in logits if logits.device.type == "cpu" else (logits,):
        part.tanh_()
    return logits.mul_(cap)


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 I] -> act(gate) * up [T, I]"""
    if activation == CLAMPED:
        return gated(gate_up.float(), activation).to(gate_up.dtype)
    width = gate_up.shape[1] // 2

    def multiplied(part: Tensor) -> Tensor:
        return activated(part[:, :width], activation).mul_(part[:, width:])

    if activation == "gelu":
        return _gelu(gate_up[:, :width]).mul_(gate_up[:, width:])
    return _by_slabs(gate_up, width, activation, multiplied)


def _gelu(x: Tensor) -> Tensor:
    """torch's own gelu rounds differently at the end of a thread's range; erf uses the same code throughout."""
    wide = x.float()
    return (wide * torch.erf(wide * 2**-0.5).add_(1.0)).mul_(0.5).to(x.dtype)


def _by_slabs(x: Tensor, width: int, activation: str, work: Callable[[Tensor], Tensor]) -> Tensor:
    """work(x), in slabs of rows if threads would cut inside rows; `width`: activated elements per row."""
    slabs = list(_slabs(x.shape[0], width, activation)) if x.device.type == "cpu" else [x.shape[0]]
    return work(x) if len(slabs) == 1 else torch.cat([work(slab) for slab in torch.split(x, slabs)])


def _slabs(num_rows: int, width: int, activation: str) -> Iterator[int]:
    """Row counts of pieces inside which threads cut a row, if at all, only between whole vectors."""
    size = num_rows * width
    threads = torch.get_num_threads()
    if activation == "silu" or size <= ONE_THREAD:  # larger gelus are always split between all threads
        threads = min(threads, -(-size // GRAIN))
    cut = -(-size // max(threads, 1))
    if threads <= 1 or cut % width == 0 or (width % VECTOR == 0 and cut % VECTOR == 0):
        yield num_rows
        return
    rows = max(1, ONE_THREAD // width)
    for start in range(0, num_rows, rows):
        yield min(rows, num_rows - start)
