"""The operations as plain arithmetic, for any device and dtype, row by row. The oracle for the other back ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_worker.kernels.kv_cache import Blocks, KVCache, KVShape, new_kv_cache
from pagoda_worker.kernels.ops import (
    CLAMP,
    CLAMPED,
    CLAMPED_GAIN,
    Added,
    AttentionShape,
    Expert,
    Forward,
    HeadNorm,
    LowRank,
    Rotation,
)
from pagoda_worker.kernels.quantized import Weight, dequantize, quantize, round_activations
from pagoda_worker.kernels.routing import Beside, Packed, Routing, routed, sigmoid
from pagoda_worker.kernels.segments import tree_sum
from pagoda_worker.rows.batch import Batch
from pagoda_worker.sampling import logprobs, sampler
from pagoda_worker.sampling.device_sampler import greedy_sampler


class Plain(NamedTuple):
    """A `quantized` weight is float32, whatever the run dtype. `group`: inputs that share a scale; 0: not rounded."""

    weight: Tensor
    bias: Tensor | None
    quantized: bool = False
    group: int = 0
    segments: int = 1


def slot_bytes(inputs: int, outputs: Sequence[int], ranks: Sequence[int]) -> int:
    """Bytes of a LowRank in float32."""
    return 4 * sum(ranks) * (inputs + sum(outputs))


class HostOps:
    """Shared by the back ends that use a `KVCache`, do not record, and sample on the host."""

    capturable = False
    lookback = 0
    own_threads = False
    integer_linear = False
    keeps_latents_once = True
    device: torch.device
    pack_gated: Callable[[Weight, Tensor | None], Any]
    pack_linear: Callable[[Weight, Tensor | None], Any]
    gated_linear: Callable[[Tensor, Any, str], Tensor]
    linear: Callable[[Tensor, Any], Tensor]
    rope_write: Callable[[Tensor, Rotation | None, HeadNorm | None, KVCache, int, Tensor], Tensor]

    def record(self, forward: Forward, kv: Sequence[KVCache], max_tokens: int) -> None:
        return None

    def new_slots(self, packed: Any, count: int, rank: int, *, gated: bool = False) -> list[LowRank | None]:
        return [None] * count

    slot_bytes = staticmethod(slot_bytes)

    def pack_experts(self, experts: Iterable[Expert], count: int, favour: Tensor | None = None) -> Packed:
        pairs = [
            (self.pack_gated(one.gate_up, one.gate_up_bias), self.pack_linear(one.down, one.down_bias))
            for one in experts
        ]
        return Packed(pairs, favour)

    def moe(
        self,
        x: Tensor,
        logits: Tensor,
        packed: Packed,
        routing: Routing,
        activation: str,
        beside: Beside | None = None,
    ) -> Tensor:
        def product(gate_up: Any, down: Any, rows: Tensor) -> Tensor:
            return self.linear(self.gated_linear(rows, gate_up, activation), down)

        return routed(x, logits, routing, packed, product, beside)

    def pack_heads(self, weight: Tensor) -> list[Any]:
        return [self.pack_linear(one, None) for one in weight]

    def head_linear(self, x: Tensor, packed: list[Any]) -> Tensor:
        parts = zip(x.chunk(len(packed), 1), packed, strict=True)
        return torch.cat([self.linear(part.contiguous(), one) for part, one in parts], 1)

    def new_kv_cache(self, shape: KVShape, num_blocks: int, block_size: int) -> KVCache:
        return new_kv_cache(shape, num_blocks, block_size, self.device)

    def write_kv(self, key: Tensor, value: Tensor, kv: KVCache, layer: int, kv_indices: Tensor) -> None:
        kept = (key, value)[: kv.shape.planes]
        kv.write(layer, kv_indices, torch.stack(kept, 1).flatten(1).to(kv.shape.dtype))

    def latent_write(  # noqa: PLR0913 - see Ops.latent_write
        self,
        query: Tensor,
        latent: Tensor,
        turning: Tensor,
        rotation: Rotation | None,
        kv: KVCache,
        layer: int,
        kv_indices: Tensor,
    ) -> Tensor:
        lines = latent_lines(query, latent, turning, kv.shape.planes)
        return self.rope_write(lines, rotation, None, kv, layer, kv_indices)

    def copy_blocks(self, kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        kv.copy_blocks(pairs)

    def export_blocks(self, kv: KVCache, block_ids: Sequence[int]) -> Blocks:
        return kv.export_blocks(block_ids)

    def import_blocks(self, kv: KVCache, block_ids: Sequence[int], blocks: Blocks) -> None:
        kv.import_blocks(block_ids, blocks)

    quantize = staticmethod(quantize)
    sample = staticmethod(sampler.sample)
    report = staticmethod(logprobs.report)
    device_sampler = staticmethod(greedy_sampler)


class ReferenceOps(HostOps):
    name = "reference"
    batch_invariant = False
    numerics = ""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pack_linear(self, weight: Weight, bias: Tensor | None = None, segments: int = 1) -> Plain:
        if isinstance(weight, Tensor):
            return Plain(weight.clone(), bias, segments=segments)  # not a view of a file
        return Plain(dequantize(weight), bias, True, weight.group if weight.activation_bits == 8 else 0, segments)

    pack_gated = pack_linear

    def fill_slot(self, slots: list[LowRank | None], slot: int, factors: LowRank | None) -> None:
        if factors is not None:
            a, b, scales = (_wide(one).to(self.device) for one in factors[:3])
            factors = factors._replace(a=a, b=b, scales=scales)
        slots[slot] = factors

    def linear(self, x: Tensor, packed: Plain, added: Added | None = None) -> Tensor:
        return add_low_rank(x, self._base(x, packed), added, F.linear)

    def _base(self, x: Tensor, packed: Plain) -> Tensor:
        if not packed.quantized and packed.segments == 1:
            return F.linear(x, packed.weight, packed.bias)
        wide = _wide(x)
        seen = round_activations(wide, packed.group).to(wide.dtype) if packed.group else wide
        parts = (seen.chunk(packed.segments, 1), packed.weight.to(wide.dtype).chunk(packed.segments, 1))
        total = tree_sum(torch.stack([F.linear(*part) for part in zip(*parts, strict=True)]))
        return (total if packed.bias is None else total + packed.bias).to(x.dtype)

    def gated_linear(self, x: Tensor, packed: Plain, activation: str, added: Added | None = None) -> Tensor:
        return gated(self.linear(x, packed, added), activation)

    def activated_linear(self, x: Tensor, packed: Plain, activation: str, added: Added | None = None) -> Tensor:
        return activated(self.linear(x, packed, added), activation)

    def logits(self, hidden: Tensor, packed: Plain, softcap: float | None = None, added: Added | None = None) -> Tensor:
        logits = self.linear(hidden, packed, added).float()
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
        x = F.embedding(token_ids, table)
        return x if scale is None else (_wide(x) * scale).to(x.dtype)

    def add_positions(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        return x + F.embedding(positions, table)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        centred = _wide(x) - _wide(x).mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
        return (normed if bias is None else normed + bias).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.layer_norm(total, weight, bias, eps), total

    def rope_write(
        self, qkv: Tensor, rotation: Rotation | None, norm: HeadNorm | None, kv: KVCache, layer: int, kv_indices: Tensor
    ) -> Tensor:
        heads, kv_heads = qkv.view(qkv.shape[0], -1, kv.shape.head_dim), kv.shape.num_kv_heads
        turning = heads[:, : heads.shape[1] - kv.shape.value_heads]
        if norm is not None:
            turning = norm.of(turning, kv_heads, self.rms_norm)
        wide = _wide(turning)
        if rotation is not None:
            wide = wide * rotation.cos + wide.roll(wide.shape[-1] // 2, -1) * rotation.sin
        turned = wide.to(qkv.dtype)
        self.write_kv(turned[:, -kv_heads:], heads[:, -kv_heads:], kv, layer, kv_indices)
        return turned[:, :-kv_heads]

    def plan(self, batch: Batch, kv: KVCache) -> Batch:
        return batch

    def attend(  # noqa: PLR0913 - see Ops.attend
        self,
        query: Tensor,
        kv: KVCache,
        layer: int,
        plan: Batch,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See Ops.attend. Online softmax is not used: this is softmax(q K^T) V, row by row."""
        rows = []
        for i in range(plan.num_rows):
            length, start = plan.context_lens[i], plan.query_starts[i]
            first, num_blocks = first_block(plan, i, kv.block_size, shape.window), -(-length // kv.block_size)
            tokens = kv.read(layer, plan.block_tables[i, first:num_blocks].long()).flatten(0, 1)
            tokens = tokens[: length - first * kv.block_size]
            key, value = _wide(tokens.repeat_interleave(shape.num_heads // shape.num_kv_heads, 2)).unbind(1)
            q = _wide(query[start : start + plan.query_lens[i]])
            scores = torch.einsum("qhd,khd->hqk", q, key) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            at = torch.arange(first * kv.block_size, length, device=query.device)
            position = at[len(at) - plan.query_lens[i] :, None]
            reach = shape.window or length
            hidden = (at >= position + (1 if shape.causal else reach)) | (at <= position - reach)
            if bias is not None:
                scores = scores + bias[:, at - position + bias.shape[1] // 2].to(scores.dtype)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                extra = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, extra), -1)
            weights = scores.softmax(-1)[..., : len(at)]
            rows.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1).to(query.dtype))
        return torch.cat(rows)


def first_block(batch: Batch, row: int, block_size: int, window: int | None) -> int:
    """The first block of a row that its new tokens see."""
    first_new = batch.context_lens[row] - batch.query_lens[row]
    return 0 if window is None else max(0, first_new - window + 1) // block_size


def latent_lines(query: Tensor, latent: Tensor, turning: Tensor, planes: int) -> Tensor:
    """The operands of `Ops.latent_write` in the form that `Ops.rope_write` takes: [T, (Hq + planes) D]."""
    halves = [half for pair in zip(turning.chunk(2, 1), latent.chunk(2, 1), strict=True) for half in pair]
    return torch.cat([query, *halves * planes], 1)


def add_low_rank(x: Tensor, y: Tensor, added: Added | None, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """y [T, N], which may be overwritten, plus the adapters' part for x [T, K]; computed in float32, rounded once more.

    `product` multiplies x [n, K] by a matrix of `added.slots`, which are LowRank or None.
    """
    for slot, places in added.tokens.groups if added is not None else ():
        factors = added.slots[slot] if added is not None else None
        if factors is None:
            continue
        low = product(_wide(x[places]), factors.a) * factors.scales
        y[places] = (_wide(y[places]) + product(low, factors.b)).to(y.dtype)
    return y


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 I] -> act(gate) * up [T, I]; see `Ops.gated_linear`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation != CLAMPED:
        return activated(gate, activation) * up
    gate = gate.clamp(max=CLAMP)
    return gate * sigmoid(CLAMPED_GAIN * gate) * (up.clamp(-CLAMP, CLAMP) + 1)


def activated(x: Tensor, activation: str) -> Tensor:
    """One of `ops.ACTIVATIONS`."""
    match activation:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _wide(x: Tensor) -> Tensor:
    """At least float32; float64 stays, so that tests can use higher precision."""
    return x if x.dtype == torch.float64 else x.float()
