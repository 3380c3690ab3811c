"""The decoder of a DecoderSpec: norm, attend, norm, MLP, over a residual stream. One forward for prefill and decode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagoda_worker.checkpoints.rope import RotaryTable
from pagoda_worker.checkpoints.source import Source
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
from pagoda_worker.kernels.kv_cache import KVLayer, KVShape, grouped
from pagoda_worker.kernels.ops import AttentionShape, Cache, HeadNorm, Ops, Rotation
from pagoda_worker.models.linear import Linear, Mlp, Packer
from pagoda_worker.rows.batch import Batch


@dataclass(frozen=True)
class Layer:
    """One layer: its matrices, its norms in float32, and where its K and V are."""

    qkv: Linear
    out: Linear
    mlp: Mlp
    norms: dict[str, torch.Tensor]
    head_norm: HeadNorm | None
    attention: AttentionShape
    rope: int  # of the spec's
    kv: KVLayer


class Decoder:
    """A model as the runner sees it."""

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        source: Source,
        dtype: torch.dtype,
        max_positions: int,
        head: bool = True,
    ) -> None:
        """Without a `head` there are hidden states, and no logits."""
        self.spec = spec
        self.ops = ops
        kept = [
            KVShape(num_layers=1, num_kv_heads=a.num_kv_heads, head_dim=a.head_dim, dtype=dtype, window=a.window)
            for a in (layer.attention for layer in spec.layers)
        ]
        self.kv_groups, kv_layers = grouped(kept)
        self._ropes = [RotaryTable(shape, max_positions, ops.device) for shape in spec.ropes]
        packer = Packer(ops, source, dtype)
        self._layers = [_load_layer(spec, packer, index, kv) for index, kv in enumerate(kv_layers)]
        self._final_norm = source.tensor(FINAL_NORM).float() + spec.norm_offset
        self._embed = source.tensor(EMBED)
        self._head = None
        if head:
            self._head = ops.pack_linear(source.tied(self._embed) if spec.tied else source.linear(HEAD))

    def on(self, ops: Ops) -> Decoder:
        """The same weights, computed by `ops`, which must be of the back end that packed them."""
        other = copy.copy(self)
        other.ops = ops
        return other

    def plan(self, batch: Batch, kv: Sequence[Cache]) -> list[Any]:
        """What `forward` makes for itself when it is given none: a plan for each group."""
        return [self.ops.plan(batch, group) for group in kv]

    def forward(self, batch: Batch, kv: Sequence[Cache], plan: list[Any] | None = None) -> torch.Tensor:
        """Write the K and V of the batch's tokens, return their final hidden states [T, H]."""
        for group in kv:
            group.admit(batch)
        plan = self.plan(batch, kv) if plan is None else plan
        rotations = [table.at(batch.positions) for table in self._ropes]
        stream = self.ops.embed(batch.token_ids, self._embed, self.spec.embed_scale)
        hidden = self._run(stream, _Step(batch, kv, plan, rotations))
        for group in kv:
            group.inspect(batch, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> [R, V] float32, in `out` if that is given."""
        logits = self.ops.logits(hidden, self._head, self.spec.final_softcap)
        return logits.float() if out is None else out.copy_(logits)

    def _run(self, stream: torch.Tensor, step: _Step) -> torch.Tensor:
        """Every branch is normed on its way in, with Gemma again on its way out, and added to the stream."""
        branch: torch.Tensor | None = None
        for layer in self._layers:
            x, stream = self._norm_in(branch, stream, layer.norms["attention"])
            branch = self._norm_out(self._attend(x, layer, step), layer.norms.get("after_attention"))
            x, stream = self._norm_in(branch, stream, layer.norms["mlp"])
            branch = self._norm_out(layer.mlp.run(x, self.ops), layer.norms.get("after_mlp"))
        return self._norm_in(branch, stream, self._final_norm)[0]

    def _norm_in(
        self, branch: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream with the last branch added (none before the first layer): normed, and as it is."""
        if branch is None:
            return self.ops.rms_norm(stream, weight, self.spec.norm_eps), stream
        return self.ops.add_rms_norm(branch, stream, weight, self.spec.norm_eps)

    def _norm_out(self, branch: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return branch if weight is None else self.ops.rms_norm(branch, weight, self.spec.norm_eps)

    def _attend(self, x: torch.Tensor, layer: Layer, step: _Step) -> torch.Tensor:
        ops, (group, index) = self.ops, layer.kv
        kv, plan = step.kv[group], step.plan[group]
        qkv, rotation = layer.qkv.linear(x, ops), step.rotations[layer.rope]
        query = ops.rope_write(qkv, rotation, layer.head_norm, kv, index, step.batch.kv_indices)
        return layer.out.linear(ops.attend(query, kv, index, plan, layer.attention), ops)


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    batch: Batch
    kv: Sequence[Cache]  # of each group, as is `plan`
    plan: list[Any]
    rotations: list[Rotation]


def _load_layer(spec: DecoderSpec, packer: Packer, index: int, kv: KVLayer) -> Layer:
    layer, prefix = spec.layers[index], layer_name(index, "")

    def norm(part: str) -> torch.Tensor:
        return packer.source.tensor(prefix + part).float() + spec.norm_offset

    return Layer(
        qkv=packer.pack(prefix, QKV, spec.qkv_bias),
        out=packer.pack(prefix, OUT, spec.out_bias, segments=spec.segments),
        mlp=Mlp(
            packer.pack(prefix, GATE_UP, layer.mlp.bias, layer.mlp.activation),
            packer.pack(prefix, DOWN, layer.mlp.bias, segments=spec.segments),
        ),
        norms={role: norm(part) for role, part in norm_parts(spec).items()},
        head_norm=_head_norm(spec, layer.attention, norm) if spec.head_norms else None,
        attention=layer.attention,
        rope=spec.ropes.index(layer.rope),
        kv=kv,
    )


def _head_norm(spec: DecoderSpec, attention: AttentionShape, norm: Callable[[str], torch.Tensor]) -> HeadNorm:
    query, key = norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight")
    weight = torch.cat((query.expand(attention.num_heads, -1), key.expand(attention.num_kv_heads, -1)))
    return HeadNorm(weight=weight, eps=spec.norm_eps)
