"""Latent attention (arXiv 2405.04434): the cache holds what keys and values of all heads derive from, once per token.

A head's key is W_k c and its value W_v c of the latent c; so q . (W_k c) = (W_k^T q) . c, and the weighted sum of
values is W_v times the weighted sum of latents. Queries are mapped into the latent space, and the result of attention
back: one KV head serves all, whose line is the latent and, beside it, the rotary part of the key. A value is the same
line, of which W_v takes only the latent: a back end that reads values where keys lie stores it once. Every step does
this, and none materialises keys and values for a prompt: those would round differently, and a row's bits would depend
on how its prompt was chunked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pagoda_worker.checkpoints.rope import RopeShape, head_order
from pagoda_worker.checkpoints.spec import DecoderSpec, LatentShape, LayerSpec
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.quantized import by_rows
from pagoda_worker.models.linear import Linear, Packer
from pagoda_worker.models.norms import Norm
from pagoda_worker.rows.slots import TokenSlots

NORM_EPS = 1e-6  # independent of the other norms'


@dataclass(frozen=True)
class Latent:
    """`queries` are one or, with a norm between them, two; `inward` and `outward` are packed per head."""

    queries: tuple[Linear, ...]
    query_norm: Norm | None
    latent: Any
    latent_norm: Norm
    turning: Any
    inward: Any
    outward: Any

    def project(
        self, x: torch.Tensor, ops: Ops, tokens: TokenSlots | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H] -> queries of latents [T, Hq * D], latents, and the rotary part of keys: see `Ops.latent_write`."""
        query = self.queries[0].linear(x, ops, tokens)
        if self.query_norm is not None:
            query = self.queries[1].linear(self.query_norm.run(query, ops), ops, tokens)
        latent = self.latent_norm.run(ops.linear(x, self.latent), ops)
        return ops.head_linear(query, self.inward), latent, ops.linear(x, self.turning)

    def values(self, attended: torch.Tensor, ops: Ops) -> torch.Tensor:
        """attended [T, Hq * D] -> [T, Hq * value]"""
        return ops.head_linear(attended, self.outward)


def load_latent(spec: DecoderSpec, layer: LayerSpec, packer: Packer, prefix: str) -> Latent:
    """`prefix`: of the layer's names."""
    names, shape, rope = spec.names, layer.latent, layer.rope
    if shape is None or rope is None:
        raise TypeError("a layer has no latents or no RoPE")
    parts = [names.qkv[0]] if shape.query_rank is None else [names.query_down, names.query_up]
    own = replace(rope, head_dim=shape.turning, turning=0)
    turning = [shape.rank + at for at in head_order(own) or range(shape.turning)]
    down = packer.source.linear(prefix + names.latent_down)
    up = [packer.source.widened(prefix + name) for name in names.latent_up]
    inward, outward = _by_heads(up, layer.attention.num_heads, shape, rope)
    return Latent(
        queries=tuple(packer.pack(prefix, [part], False) for part in parts),
        query_norm=None if shape.query_rank is None else _norm(packer, prefix + names.query_latent_norm),
        latent=packer.ops.pack_linear(by_rows(down, lambda rows: rows[: shape.rank])),
        latent_norm=_norm(packer, prefix + names.latent_norm),
        turning=packer.ops.pack_linear(by_rows(down, lambda rows: rows[turning])),
        inward=packer.ops.pack_heads(inward),
        outward=packer.ops.pack_heads(outward),
    )


def _norm(packer: Packer, name: str) -> Norm:
    return Norm(packer.source.exact(f"{name}.weight"), None, NORM_EPS, centred=False)


def _by_heads(
    up: list[torch.Tensor], heads: int, shape: LatentShape, rope: RopeShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maps from a head's query to a line [Hq, D, plain + turning], and back to its value [Hq, value, D]; `up`: see
    `Names.latent_up`.

    A line is the rotary part, then the latent, in the order of `head_order`. The rotary part is passed through.
    """
    if len(up) == 1:
        both = up[0].view(heads, shape.plain + shape.value, shape.rank)
        keys, values = both[:, : shape.plain].mT, both[:, shape.plain :]
    else:
        keys, values = up[0].view(heads, shape.rank, shape.plain), up[1].view(heads, shape.value, shape.rank)
    still = keys.new_zeros(heads, shape.turning, shape.plain)
    own = torch.eye(shape.turning, dtype=keys.dtype, device=keys.device).expand(heads, -1, -1)
    nothing = keys.new_zeros(heads, shape.rank, shape.turning)
    inward = torch.cat((torch.cat((still, own), 2), torch.cat((keys, nothing), 2)), 1)
    outward = torch.cat((values.new_zeros(heads, shape.value, shape.turning), values), 2)
    order = head_order(rope)
    return (inward, outward) if order is None else (inward[:, order], outward[:, :, order])
