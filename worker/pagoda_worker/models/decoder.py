"""The decoder of a DecoderSpec: norm, attend, norm, MLP, over a residual stream. One forward for prefill and decode.

Matrices that read the same input are one matrix (queries, keys and values; gate and up), merged while loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagoda_worker.checkpoints.rope import RotaryTable
from pagoda_worker.checkpoints.source import Source, joined
from pagoda_worker.checkpoints.spec import (
    DOWN,
    EMBED,
    FINAL_NORM,
    GATE_UP,
    HEAD,
    OUT,
    QKV,
    DecoderSpec,
    layer_name,
    norm_parts,
)
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import AttentionShape, Cache, HeadNorm, Ops, Rotation
from pagoda_worker.rows.batch import Batch


@dataclass(frozen=True)
class Layer:
    """The weights of one layer: packed matrices, and norms in float32."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    norms: dict[str, torch.Tensor]
    head_norm: HeadNorm | None
    attention: AttentionShape
    rope: int


class Decoder:
    """A model as the runner sees it."""

    def __init__(self, spec: DecoderSpec, ops: Ops, source: Source, dtype: torch.dtype, max_positions: int) -> None:
        self.spec = spec
        self.ops = ops
        self.kv_shape = KVShape(
            num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype
        )
        self._ropes = [RotaryTable(shape, max_positions, ops.device) for shape in spec.ropes]
        self._layers = [_load_layer(spec, ops, source, dtype, layer) for layer in range(spec.num_layers)]
        self._final_norm = source.tensor(FINAL_NORM).float() + spec.norm_offset
        self._embed = source.tensor(EMBED)
        self._head = ops.pack_linear(source.tied(self._embed) if spec.tied else source.linear(HEAD))

    def on(self, ops: Ops) -> Decoder:
        """The same weights, computed by `ops`, which must be of the back end that packed them."""
        other = copy.copy(self)
        other.ops = ops
        return other

    def plan(self, batch: Batch, kv: Cache) -> Any:
        """What `forward` makes for itself when it is given none."""
        return self.ops.plan(batch, kv)

    def forward(self, batch: Batch, kv: Cache, plan: Any = None) -> torch.Tensor:
        """Write the K and V of the batch's tokens, return their final hidden states [T, H]."""
        kv.admit(batch)
        plan = self.plan(batch, kv) if plan is None else plan
        rotations = [table.at(batch.positions) for table in self._ropes]
        stream = self.ops.embed(batch.token_ids, self._embed, self.spec.embed_scale)
        run = self._branch_normed if self.spec.branch_norms else self._plain
        hidden = run(stream, _Step(batch, kv, plan, rotations))
        kv.inspect(batch, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> [R, V] float32, in `out` if that is given."""
        logits = self.ops.logits(hidden, self._head)
        logits = logits.float() if out is None else out.copy_(logits)
        cap = self.spec.final_softcap
        return logits if cap is None else soft_cap(logits, cap)

    def _plain(self, stream: torch.Tensor, step: _Step) -> torch.Tensor:
        """Pre-norm: every branch is normed on its way in and added on its way out."""
        branch: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, stream = self._norm_in(branch, stream, layer.norms["attention"])
            branch = self._attend(x, index, layer, step)
            x, stream = self._norm_in(branch, stream, layer.norms["mlp"])
            branch = self._mlp(x, layer)
        return self._norm_in(branch, stream, self._final_norm)[0]

    def _branch_normed(self, stream: torch.Tensor, step: _Step) -> torch.Tensor:
        """Gemma: every branch is normed on its way in and again on its way out."""
        ops, eps = self.ops, self.spec.norm_eps
        branch: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, stream = self._norm_in(branch, stream, layer.norms["attention"])
            branch = ops.rms_norm(self._attend(x, index, layer, step), layer.norms["after_attention"], eps)
            x, stream = self._norm_in(branch, stream, layer.norms["mlp"])
            branch = ops.rms_norm(self._mlp(x, layer), layer.norms["after_mlp"], eps)
        return self._norm_in(branch, stream, self._final_norm)[0]

    def _norm_in(
        self, branch: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream with the last branch added (none before the first layer): normed, and as it is."""
        if branch is None:
            return self.ops.rms_norm(stream, weight, self.spec.norm_eps), stream
        return self.ops.add_rms_norm(branch, stream, weight, self.spec.norm_eps)

    def _attend(self, x: torch.Tensor, index: int, layer: Layer, step: _Step) -> torch.Tensor:
        ops, kv = self.ops, step.kv
        qkv = ops.linear(x, layer.qkv)
        rotation = step.rotations[layer.rope]
        query = ops.rope_write(qkv, rotation, layer.head_norm, kv, index, step.batch.kv_indices)
        return ops.linear(ops.attend(query, kv, index, step.plan, layer.attention), layer.out)

    def _mlp(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ops = self.ops
        return ops.linear(ops.gated_linear(x, layer.gate_up, self.spec.activation), layer.down)


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    batch: Batch
    kv: Cache
    plan: Any
    rotations: list[Rotation]


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap), in place; on a CPU one row at a time, so that a row's bits are its own."""
    logits.div_(cap)
    for part in logits if logits.device.type == "cpu" else (logits,):
        part.tanh_()
    return logits.mul_(cap)


def _load_layer(spec: DecoderSpec, ops: Ops, source: Source, dtype: torch.dtype, layer: int) -> Layer:
    def pack(parts: tuple[str, ...], biased: bool, packed: Callable[..., Any] = ops.pack_linear) -> Any:
        weights = [source.linear(layer_name(layer, part)) for part in parts]
        biases = [source.tensor(layer_name(layer, f"{part}.bias")) for part in parts] if biased else []
        return packed(joined(weights, dtype), torch.cat(biases) if biases else None)

    def norm(part: str) -> torch.Tensor:
        return source.tensor(layer_name(layer, part)).float() + spec.norm_offset

    return Layer(
        qkv=pack(QKV, spec.qkv_bias),
        out=pack(OUT, spec.out_bias),
        gate_up=pack(GATE_UP, spec.mlp_bias, ops.pack_gated),
        down=pack(DOWN, spec.mlp_bias),
        norms={role: norm(part) for role, part in norm_parts(spec).items()},
        head_norm=_head_norm(spec, norm) if spec.head_norms else None,
        attention=spec.attention[layer],
        rope=spec.rope_of_layer[layer],
    )


def _head_norm(spec: DecoderSpec, norm: Callable[[str], torch.Tensor]) -> HeadNorm:
    query, key = norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight")
    weight = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
    return HeadNorm(weight=weight, eps=spec.norm_eps)
