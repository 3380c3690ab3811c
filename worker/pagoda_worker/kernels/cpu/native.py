"""The `native` back end: our C++ kernels, bfloat16 on CPU.

Every operation becomes an `Op` of the kernel library. A *tape* decides what happens to it: `Immediate` runs it at once
(the op-by-op path, which is the oracle for the other); `Recording` (see `program`) records it. The operations are the
same code either way, so both paths compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_proto.steps import TopLogprobs
from pagoda_worker.kernels.cpu import cache, experts, heads, low_rank, sampling
from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.cpu.cache import NativeKVCache
from pagoda_worker.kernels.cpu.operations import (
    Add,
    Attention,
    Embed,
    LayerCache,
    LayerNorm,
    Linear,
    NativeLinear,
    RmsNorm,
    RopeKv,
    Tape,
)
from pagoda_worker.kernels.cpu.program import Immediate, Program, Recording
from pagoda_worker.kernels.ops import (
    ACTIVATIONS,
    CLAMPED,
    Added,
    AttentionShape,
    Expert,
    Forward,
    HeadNorm,
    Rotation,
)
from pagoda_worker.kernels.quantized import Format, QuantizedWeight, Weight, by_rows, dequantize, quantize
from pagoda_worker.kernels.routing import Beside, Routing
from pagoda_worker.rows.batch import Batch, Places, batch_of_spans
from pagoda_worker.sampling.device_sampler import greedy_sampler
from pagoda_worker.sampling.sampler import Fault, RowState, Sample

LANES = 16  # values that kernels process at a time; sizes are multiples of it
ATTENTION_SPLIT = 256  # keys per split; see SPLIT in csrc/attention_cells.h
BIAS_MARGIN = 64  # bias entries that attention reads beyond the last key
FORMS = ((8, 8), (4, 8), (4, 16))  # (weight bits, activation bits) with kernels
FLOAT_FORM, MINIMA_FORM = (4, 16), (4, 8)
GROUP = 32  # the group size must be a multiple of this
MAX_GROUP = 65536  # products of 8 by 8 bits whose sum fits in 32 bits
BF16_FORM = (16, 16, 0, 0)


class NativePlan(NamedTuple):
    """What attention reads of a step. The tensors must live as long as pointers to them are used."""

    block_tables: Tensor  # [B, max_blocks] int32
    query_starts: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32


class NativeOps:
    """See `Ops`. `library` packs weights; `tape` receives operations."""

    name = "native"
    capturable = False
    batch_invariant = True
    own_threads = True
    integer_linear = True
    keeps_latents_once = True
    lookback = 31  # attention begins at a multiple of 32 keys
    device = torch.device("cpu")

    def __init__(self, library: lib.Library, tape: Tape | None = None) -> None:
        self.library = library
        self.numerics = f"{library.level} split {ATTENTION_SPLIT} {sampling.NUMERICS}"
        self._tape = tape or Immediate(library)
        self._sampler = sampling.Sampler(library)
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    def record(
        self, forward: Forward, kv: Sequence[NativeKVCache], max_tokens: int
    ) -> Callable[[Batch], tuple[Tensor, ...]]:
        tape, longest = Recording(max_tokens), batch_of_spans([(0, max_tokens)], torch.zeros(1, 1, dtype=torch.int32))
        others = max((group.shape.table for group in kv), default=0)
        longest = replace(longest, others=(Places(longest.kv_indices, longest.block_tables),) * others)
        results = forward(self.on(tape), longest, kv)  # only the batch's length matters
        return Program(self.library, lambda batch: self._whole_plan(batch, kv), tape, results, (forward, kv)).run

    def _whole_plan(self, batch: Batch, kv: Sequence[NativeKVCache]) -> dict[str, Tensor]:
        """What all groups read of a step, by field of `lib.Step`."""
        plan = {"kv_indices": batch.kv_indices, **self.plan(batch, kv[0])._asdict()}
        if batch.others:
            plan["kv_indices"] = torch.stack([batch.kv_indices, *(one.kv_indices for one in batch.others)])
            plan["block_tables"] = torch.stack([batch.block_tables, *(one.block_tables for one in batch.others)])
        return plan

    def on(self, tape: Tape) -> NativeOps:
        """The same operations on another tape."""
        return NativeOps(self.library, tape)

    def quantize(self, weight: Tensor, form: Format) -> QuantizedWeight:
        if weight.dtype not in lib.QUANTIZED_FROM or (form.group or weight.shape[1]) % LANES:
            return quantize(weight, form)
        return self.library.quantize(weight, form)

    def pack_linear(
        self, weight: Weight, bias: Tensor | None = None, segments: int = 1, *, new: lib.New = lib.pages
    ) -> NativeLinear:
        """A quantised weight without a kernel is packed as bfloat16."""
        if isinstance(weight, QuantizedWeight) and not _has_kernel(weight):
            weight = dequantize(weight).bfloat16()
        if bias is not None:
            bias = F.pad(bias, (0, -len(bias) % lib.PANEL))
        n, k = weight.shape
        if isinstance(weight, QuantizedWeight):
            return NativeLinear(self.library.pack_quantized(weight, new), bias, n, k, lib.quant_form(weight), segments)
        return NativeLinear(self.library.pack(weight.contiguous(), new), bias, n, k, BF16_FORM, segments)

    def pack_gated(self, weight: Weight, bias: Tensor | None = None, *, new: lib.New = lib.pages) -> NativeLinear:
        """Gate and up are side by side in every panel, so that one tile holds both halves of an output in registers."""
        moved = None if bias is None else _side_by_side(bias)
        packed = self.pack_linear(by_rows(weight, _side_by_side), moved, new=new)
        return packed._replace(n=weight.shape[0])

    def new_slots(self, packed: NativeLinear, count: int, rank: int, *, gated: bool = False) -> low_rank.Slots:
        return low_rank.new_slots(count, rank, _side_by_side if gated else None)

    fill_slot = staticmethod(low_rank.fill_slot)
    slot_bytes = staticmethod(low_rank.slot_bytes)

    def linear(self, x: Tensor, packed: NativeLinear, added: Added | None = None) -> Tensor:
        return self._linear(x, packed, torch.bfloat16, added=added)

    def gated_linear(self, x: Tensor, packed: NativeLinear, activation: str, added: Added | None = None) -> Tensor:
        return self._linear(x, packed, torch.bfloat16, _gate(activation), added=added)

    def activated_linear(self, x: Tensor, packed: NativeLinear, activation: str, added: Added | None = None) -> Tensor:
        return self._linear(x, packed, torch.bfloat16, -1 - ACTIVATIONS.index(activation), added=added)

    def pack_experts(
        self, weights: Iterable[Expert], count: int, favour: Tensor | None = None
    ) -> experts.NativeExperts:
        return experts.stacked(weights, count, favour, self.pack_gated, self.pack_linear)

    def moe(
        self,
        x: Tensor,
        logits: Tensor,
        packed: experts.NativeExperts,
        routing: Routing,
        activation: str,
        beside: Beside | None = None,
    ) -> Tensor:
        if beside is not None:
            beside = Beside(beside.product.contiguous(), beside.gate)
        return experts.run(self._tape, x.contiguous(), logits, packed, routing, _gate(activation), beside)

    def pack_heads(self, weight: Tensor) -> heads.NativeHeads:
        return heads.packed(self.library, weight)

    def head_linear(self, x: Tensor, packed: heads.NativeHeads) -> Tensor:
        return heads.run(self._tape, x.contiguous(), packed)

    def logits(
        self, hidden: Tensor, packed: NativeLinear, softcap: float | None = None, added: Added | None = None
    ) -> Tensor:
        """float32, directly from the accumulators."""
        return self._linear(hidden, packed, torch.float32, softcap=softcap, added=added)

    def _linear(
        self,
        x: Tensor,
        packed: NativeLinear,
        dtype: torch.dtype,
        activation: int = 0,
        softcap: float | None = None,
        added: Added | None = None,
    ) -> Tensor:
        """`activation`: see `LinearOp` in csrc/program.h."""
        x = x.contiguous()
        slots, low, width = low_rank.shrink(self._tape, x, added) if added is not None else (None, None, 0)
        y = self._tape.buffer(x.shape[0], packed.n if activation <= 0 else packed.n // 2, dtype)
        operation = Linear(
            x=x, panels=packed.panels, y=y, bias=packed.bias, n=packed.n, k=packed.k,
            activation=activation, out_f32=int(dtype == torch.float32), form=packed.form,
            segments=packed.segments, softcap=softcap or 0.0, slots=slots, low=low, low_width=width,
        )  # fmt: skip
        self._tape.take(operation, num_tokens=x.shape[0])
        return y

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
        y = self._tape.buffer(token_ids.shape[0], table.shape[1], torch.bfloat16)
        operation = Embed(table=table, y=y, dim=table.shape[1], scale=1.0 if scale is None else scale)
        self._tape.take(operation, num_tokens=token_ids.shape[0], token_ids=token_ids)
        return y

    def add_positions(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        operation = Add(x=table, y=x, dim=table.shape[1], by_position=1)
        self._tape.take(operation, num_tokens=x.shape[0], positions=positions)
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self._tape.take(Add(x=x.contiguous(), y=y, dim=x.shape[1]), num_tokens=x.shape[0])
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self._tape.buffer(x.shape[0], x.shape[1], torch.bfloat16)
        return self._norm(x, residual, total, weight, eps), total

    def _norm(self, x: Tensor, residual: Tensor | None, total: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = self._tape.buffer(x.shape[0], x.shape[1], torch.bfloat16)
        operation = RmsNorm(x=x, residual=residual, sum=total, weight=weight, y=y, dim=x.shape[1], eps=eps)
        self._tape.take(operation, num_tokens=x.shape[0])
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._layer_norm(x, None, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The sum overwrites `residual`."""
        return self._layer_norm(x, residual, weight, bias, eps), residual

    def _layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        x = x.contiguous()
        y = self._tape.buffer(x.shape[0], x.shape[1], torch.bfloat16)
        operation = LayerNorm(x=x, residual=residual, weight=weight, bias=bias, y=y, dim=x.shape[1], eps=eps)
        self._tape.take(operation, num_tokens=x.shape[0])
        return y

    def rope_write(
        self,
        qkv: Tensor,
        rotation: Rotation | None,
        norm: HeadNorm | None,
        kv: NativeKVCache,
        layer: int,
        kv_indices: Tensor,
    ) -> Tensor:
        *tables, positions = _tables(rotation)
        return self._write(qkv, kv, layer, kv_indices, norm, tables, positions)

    def latent_write(  # noqa: PLR0913 - see Ops.latent_write
        self,
        query: Tensor,
        latent: Tensor,
        turning: Tensor,
        rotation: Rotation | None,
        kv: NativeKVCache,
        layer: int,
        kv_indices: Tensor,
    ) -> Tensor:
        dim = kv.shape.head_dim
        cos, sin, positions = _tables(rotation)
        q = self._tape.buffer(len(query), query.shape[1], torch.bfloat16)
        operation = RopeKv(
            qkv=query, q=q, kv=self._layer(kv, layer), cos=cos, sin=sin, norm=None,
            heads=query.shape[1] // dim, eps=0.0, latent=latent, turning=turning, turns=turning.shape[1],
        )  # fmt: skip
        self._tape.take(operation, num_tokens=len(query), positions=positions, kv_indices=kv_indices)
        return q.view(len(q), -1, dim)

    def write_kv(self, key: Tensor, value: Tensor, kv: NativeKVCache, layer: int, kv_indices: Tensor) -> None:
        kept = (key.flatten(1), value.flatten(1))[: kv.shape.planes]
        self._write(torch.cat(kept, 1), kv, layer, kv_indices)

    def _write(  # noqa: PLR0913 - the operands of one kernel
        self,
        qkv: Tensor,
        kv: NativeKVCache,
        layer: int,
        kv_indices: Tensor,
        norm: HeadNorm | None = None,
        tables: Sequence[Tensor | None] = (None, None),
        positions: Tensor | None = None,
    ) -> Tensor:
        head_dim, num_kv_heads = kv.shape.head_dim, kv.shape.num_kv_heads
        num_heads = qkv.shape[1] // head_dim - kv.shape.planes * num_kv_heads
        weight, eps, whole = (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.whole)
        cos, sin = tables
        changed = cos is not None or weight is not None
        q = self._tape.buffer(qkv.shape[0], num_heads * head_dim, torch.bfloat16) if changed else None
        operation = RopeKv(
            qkv=qkv, q=q, kv=self._layer(kv, layer), cos=cos, sin=sin, norm=weight, heads=num_heads, eps=eps,
            whole=int(whole),
        )  # fmt: skip
        self._tape.take(operation, num_tokens=qkv.shape[0], positions=positions, kv_indices=kv_indices)
        queries = qkv[:, : num_heads * head_dim] if q is None else q
        return queries.view(len(queries), num_heads, head_dim)

    def _layer(self, kv: NativeKVCache, layer: int) -> LayerCache:
        return kv.layer(layer, kv.shape.table if self._tape.all_tables else 0)

    def plan(self, batch: Batch, kv: NativeKVCache) -> NativePlan:
        return NativePlan(batch.block_tables.contiguous(), batch.starts, batch.lengths)

    def attend(  # noqa: PLR0913 - see Ops.attend
        self,
        query: Tensor,
        kv: NativeKVCache,
        layer: int,
        plan: NativePlan,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        _, heads, dim = query.shape
        if query.stride(0) < heads * dim or query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        out = self._tape.buffer(query.shape[0], shape.num_heads * shape.head_dim, torch.bfloat16)
        operation = Attention(
            q=query, out=out, kv=self._layer(kv, layer), sinks=sinks, heads=shape.num_heads, window=shape.window or 0,
            scale=shape.scale, softcap=shape.softcap or 0.0, bias=self._padded(bias),
            stride=0 if bias is None else bias.shape[1] + BIAS_MARGIN, zero=0 if bias is None else bias.shape[1] // 2,
            causal=int(shape.causal), q_stride=query.stride(0),
        )  # fmt: skip
        num_rows, max_blocks = plan.block_tables.shape
        self._tape.take(
            operation, num_tokens=query.shape[0], num_rows=num_rows, max_blocks=max_blocks, **plan._asdict()
        )
        return out

    def _padded(self, bias: Tensor | None) -> Tensor | None:
        """The bias with a margin after each head's line, which is read and masked; made once per bias."""
        if bias is None:
            return None
        kept = self._biases.get(bias.data_ptr())
        if kept is None or kept[0] is not bias:
            kept = self._biases[bias.data_ptr()] = bias, F.pad(bias.float(), (0, BIAS_MARGIN)).contiguous()
        return kept[1]

    new_kv_cache = staticmethod(cache.new_native_cache)
    export_blocks = staticmethod(cache.export_blocks)
    import_blocks = staticmethod(cache.import_blocks)

    def copy_blocks(self, kv: NativeKVCache, pairs: Sequence[tuple[int, int]]) -> None:
        self.library.copy_blocks(kv.tensors, pairs)

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sample | Fault]:
        return self._sampler.sample(logits, rows)

    def report(self, logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TopLogprobs]:
        return sampling.report(self.library, logits, tokens, num_top)

    device_sampler = staticmethod(greedy_sampler)


def _tables(rotation: Rotation | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Tables of cosines and sines, and positions."""
    return (None, None, None) if rotation is None else (rotation.cos_table, rotation.sin_table, rotation.positions)


def _gate(activation: str) -> int:
    """The `activation` of `LinearOp` in csrc/program.h for gate and up."""
    return 1 + (*ACTIVATIONS, CLAMPED).index(activation)


def _has_kernel(weight: QuantizedWeight) -> bool:
    forms = (FLOAT_FORM,) if weight.floats else FORMS if weight.minima is None else (MINIMA_FORM,)
    if (weight.bits, weight.activation_bits) not in forms or weight.group % GROUP or weight.group > MAX_GROUP:
        return False
    return weight.bits == 8 or weight.floats or _in_float16(weight)


def _in_float16(weight: QuantizedWeight) -> bool:
    half, largest = torch.finfo(torch.float16), weight.scales.abs().max().item()
    if largest < half.tiny and not torch.equal(weight.scales.half().float(), weight.scales):
        return False  # beside a normal one, subnormal scales are negligible
    return largest <= half.max and (weight.minima is None or weight.minima.abs().max().item() <= half.max)


def _side_by_side(gate_up: Tensor) -> Tensor:
    """Lines 0 .. I - 1 gate, I .. 2 I - 1 up -> 16 of gate, the same 16 of up, and so on, padded with zeros."""
    halves = gate_up.reshape(2, -1, *gate_up.shape[1:])
    padded = F.pad(halves, (0, 0) * (halves.dim() - 2) + (0, -halves.shape[1] % LANES))
    return padded.view(2, -1, LANES, *gate_up.shape[1:]).transpose(0, 1).flatten(0, 2)
