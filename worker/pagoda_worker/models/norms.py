"""The norms of a model: of the stream where a branch reads it, of a branch's output, and of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pagoda_worker.checkpoints.rope import head_order
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec
from pagoda_worker.kernels.ops import HeadNorm, Ops
from pagoda_worker.rows.slots import TokenSlots

Take = Callable[[str], torch.Tensor]
"""A tensor of the checkpoint by its name."""


@dataclass(frozen=True)
class Norm:
    """Over the hidden size. `weight` and `bias` [H] float32; `centred`: the mean is subtracted first.

    `instead` are adapters' norms, by slot: tokens of these adapters are normed again, by their own norm.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool
    instead: dict[int, Norm] = field(default_factory=dict)

    def run(self, x: torch.Tensor, ops: Ops, tokens: TokenSlots | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H]; see `Decoder.replaced` for `tokens`."""
        if self.centred:
            y = ops.layer_norm(x, self.weight, self.bias, self.eps)
        else:
            y = ops.rms_norm(x, self.weight, self.eps)
        return self._again(x, y, ops, tokens)

    def add(
        self, x: torch.Tensor, stream: torch.Tensor, ops: Ops, tokens: TokenSlots | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and stream [T, H], which may be overwritten -> the norm of their sum, and the sum."""
        if self.centred:
            y, total = ops.add_layer_norm(x, stream, self.weight, self.bias, self.eps)
        else:
            y, total = ops.add_rms_norm(x, stream, self.weight, self.eps)
        return self._again(total, y, ops, tokens), total

    def _again(self, x: torch.Tensor, y: torch.Tensor, ops: Ops, tokens: TokenSlots | None) -> torch.Tensor:
        for slot, places in tokens.groups if tokens is not None else ():
            if slot in self.instead:
                y[places] = self.instead[slot].run(x[places], ops)
        return y


def load_norm(spec: DecoderSpec, take: Take, name: str, of_stream: bool, scale: float = 1.0) -> Norm:
    """`scale`: of the output.

    If a model scales its branches, its stream is kept divided by that scale: branches are then added as they are, and a
    norm of the stream gives the same result with eps divided by the scale's square.
    """
    weight = (take(f"{name}.weight").float() + spec.norm_offset) * scale
    bias = take(f"{name}.bias").float() * scale if spec.norm_bias else None
    eps = spec.norm_eps / spec.residual_scale**2 if of_stream else spec.norm_eps
    return Norm(weight, bias, eps, centred=spec.norm_kind == "layer")


def load_head_norm(
    spec: DecoderSpec, layer: LayerSpec, take: Take, index: int, device: torch.device
) -> HeadNorm | None:
    """The norm of query and key heads, in the order of dimensions used for rotation."""
    if layer.unit_heads:  # rotation keeps their length, so the order does not matter
        heads = layer.attention.num_heads + layer.attention.num_kv_heads
        return HeadNorm(weight=torch.ones(heads, layer.attention.head_dim, device=device), eps=spec.norm_eps)
    if not spec.head_norms and not spec.width_norms:
        return None
    attention, names = layer.attention, spec.names
    order = head_order(layer.rope) if layer.rope is not None else None
    parts = []
    for norm, heads in ((names.query_norm, attention.num_heads), (names.key_norm, attention.num_kv_heads)):
        weight = take(f"{names.in_layer(index, norm)}.weight").float() + spec.norm_offset
        lines = weight.view(-1, attention.head_dim).expand(heads, -1)
        parts.append(lines if order is None else lines[:, order])
    return HeadNorm(weight=torch.cat(parts), eps=spec.norm_eps, whole=spec.width_norms)
