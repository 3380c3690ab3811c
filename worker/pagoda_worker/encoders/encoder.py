"""The encoder of an EncoderSpec: packed rows without padding, each read whole in one pass.

Attention reads from a cache as in decoders, but nothing is kept there: it holds one layer's K and V, which each layer
overwrites. So the kernels are those of decoders, told that a layer is not causal.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagoda_worker.checkpoints.source import Source
from pagoda_worker.checkpoints.spec import MlpShape
from pagoda_worker.encoders.spec import FARTHEST, EncoderLayer, EncoderSpec, biased
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Cache, Ops, Rotation
from pagoda_worker.models.linear import Linear, Mlp, Packer
from pagoda_worker.models.tables import rotary_tables
from pagoda_worker.rows.batch import Batch


@dataclass(frozen=True)
class Norm:
    weight: torch.Tensor  # float32
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Layer:
    spec: EncoderLayer
    qkv: Linear
    out: Linear
    mlp: Mlp
    attention_norm: Norm | None
    mlp_norm: Norm
    rope: int  # index of the encoder's; -1: none


class Encoder:
    """A model that reads; see `models.recorded.Reading`. `pairs`: whether it is given pairs of texts.

    Attributes:
        second_place: What is added to the positions of a pair's second text, which is of another type; 0: it is not.
    """

    def __init__(
        self, spec: EncoderSpec, ops: Ops, source: Source, dtype: torch.dtype, max_len: int, *, pairs: bool = False
    ) -> None:
        self.spec = spec
        self.ops = ops
        attention = spec.layers[0].attention
        self.scratch = KVShape(
            num_layers=1, num_kv_heads=attention.num_kv_heads, head_dim=attention.head_dim, dtype=dtype
        )
        apart = pairs and spec.num_types > 1 and not spec.num_places
        of_bias = 2 * attention.num_heads * torch.float32.itemsize if spec.biased_by_distance else 0
        of_types = 2 * spec.hidden_size * dtype.itemsize if apart else 0
        self._ropes = rotary_tables(spec.ropes, max_len, ops.device, of_bias + of_types, copies=1 + apart)
        packer = Packer(ops, source, dtype)
        self._layers = [
            _load_layer(spec, packer, index, -1 if layer.rope is None else spec.ropes.index(layer.rope))
            for index, layer in enumerate(spec.layers)
        ]
        self._embed_norm = _norm(spec, source, spec.names.embed_norm)
        self._final_norm = _norm(spec, source, spec.names.final_norm) if spec.names.final_norm else None
        self._words, self._places = _tables(spec, source, dtype, max_len if apart else 0)
        self.second_place = len(self._places) // 2 if self._places is not None and spec.num_types > 1 else 0
        self._bias = _bias(spec, source, max_len)

    def on(self, ops: Ops) -> Encoder:
        """The same weights, computed by `ops`, which must be of the back end that packed them."""
        other = copy.copy(self)
        other.ops = ops
        return other

    def forward(self, batch: Batch, kv: Sequence[Cache]) -> torch.Tensor:
        """Final hidden states [T, H] of whole rows; `kv` is a cache of the shape `scratch`."""
        (cache,) = kv
        cache.admit(batch)
        plan = self.ops.plan(batch, cache)
        rotations = [table.at(batch.positions) for table in self._ropes]
        words = self.ops.embed(batch.token_ids, self._words, None)
        if self._places is not None:
            words = self.ops.add_positions(words, self._places, batch.positions)
        stream = self._normed(words, self._embed_norm)
        step = _Step(batch, cache, plan, rotations)
        hidden = self._before(stream, step) if self.spec.pre_norm else self._after(stream, step)
        cache.inspect(batch, hidden)
        return hidden

    def _after(self, stream: torch.Tensor, step: _Step) -> torch.Tensor:
        """Post-norm: each branch is added to its input, and the sum is normed."""
        eps = self.spec.norm_eps
        for layer in self._layers:
            branch = self._attend(stream, layer, step)
            if layer.attention_norm is not None:
                stream = self.ops.add_layer_norm(branch, stream, *_of(layer.attention_norm), eps)[0]
            branch = layer.mlp.run(stream, self.ops)
            stream = self.ops.add_layer_norm(branch, stream, *_of(layer.mlp_norm), eps)[0]
        return stream

    def _before(self, stream: torch.Tensor, step: _Step) -> torch.Tensor:
        """Pre-norm: each branch reads its normed input, and is added to the unnormed one."""
        eps, branch = self.spec.norm_eps, None
        for layer in self._layers:
            x = stream
            if branch is not None and layer.attention_norm is not None:
                x, stream = self.ops.add_layer_norm(branch, stream, *_of(layer.attention_norm), eps)
            branch = self._attend(x, layer, step)
            x, stream = self.ops.add_layer_norm(branch, stream, *_of(layer.mlp_norm), eps)
            branch = layer.mlp.run(x, self.ops)
        if branch is None or self._final_norm is None:
            return stream
        return self.ops.add_layer_norm(branch, stream, *_of(self._final_norm), eps)[0]

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.ops.layer_norm(x, *_of(norm), self.spec.norm_eps)

    def _attend(self, x: torch.Tensor, layer: Layer, step: _Step) -> torch.Tensor:
        ops = self.ops
        rotation = None if layer.rope < 0 else step.rotations[layer.rope]
        query = ops.rope_write(layer.qkv.linear(x, ops), rotation, None, step.cache, 0, step.batch.kv_indices)
        attended = ops.attend(query, step.cache, 0, step.plan, layer.spec.attention, bias=self._bias)
        return layer.out.linear(attended, ops)


@dataclass(frozen=True)
class _Step:
    """Shared by all layers of a step."""

    batch: Batch
    cache: Cache
    plan: Any
    rotations: list[Rotation]


def _of(norm: Norm) -> tuple[torch.Tensor, torch.Tensor | None]:
    return norm.weight, norm.bias


def _norm(spec: EncoderSpec, source: Source, name: str) -> Norm:
    weight = source.tensor(f"{name}.weight").float()
    return Norm(weight, source.tensor(f"{name}.bias").float() if spec.norm_bias else None)


def _load_layer(spec: EncoderSpec, packer: Packer, index: int, rope: int) -> Layer:
    layer, names, with_bias = spec.layers[index], spec.names, biased(spec)

    def pack(*parts: str) -> Linear:
        return packer.pack(spec.in_layer(index, ""), parts, parts[0] in with_bias)

    shape = MlpShape(width=spec.width, activation=spec.activation, bias=spec.up_bias, gated=spec.gated)

    def norm(name: str) -> Norm:
        return _norm(spec, packer.source, spec.in_layer(index, name))

    return Layer(
        spec=layer,
        qkv=pack(*names.qkv),
        out=pack(names.out),
        mlp=Mlp(packer.pack_up(spec.in_layer(index, ""), names.up, shape), pack(names.down)),
        attention_norm=norm(names.attention_norm) if layer.attention_norm else None,
        mlp_norm=norm(names.mlp_norm),
        rope=rope,
    )


def _tables(
    spec: EncoderSpec, source: Source, dtype: torch.dtype, apart: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Word embeddings, and embeddings added by position: positions plus the first text type, then plus the second.

    Without learned positions, the first type is added to the words here; if texts of up to `apart` tokens (0: none) are
    told apart, what the second type differs by is added at the positions after those.
    """
    names = spec.names
    words = source.tensor(f"{names.words}.weight")
    types = source.tensor(f"{names.types}.weight").float() if spec.num_types else None
    if not spec.num_places:
        differs = None
        if types is not None and apart:
            differs = torch.zeros(2 * apart, spec.hidden_size, dtype=dtype, device=words.device)
            differs[apart:] = types[1] - types[0]
        return (words if types is None else (words.float() + types[0]).to(dtype)), differs
    places = source.tensor(f"{names.positions}.weight").float()[spec.first_place :]
    if types is not None:
        places = torch.cat([places + kind for kind in types[:2]])
    return words, places.to(dtype).contiguous()


def _bias(spec: EncoderSpec, source: Source, max_len: int) -> torch.Tensor | None:
    """[Hq, 2 max_len - 1] float32 by distance from query to key, for families with such a bias."""
    if spec.num_buckets:
        return _distances(spec, source, max_len)
    if not spec.alibi:
        return None
    apart = torch.arange(1 - max_len, max_len).abs().float()
    slopes = torch.tensor(alibi_slopes(spec.layers[0].attention.num_heads))
    return (-slopes[:, None] * apart).to(source.tensor(f"{spec.names.words}.weight").device)


def alibi_slopes(heads: int) -> list[float]:
    """How much each head's scores fall per token (arXiv 2108.12409): a geometric series for the first heads, as many as
    the largest power of two, and for the rest every other number of a series twice as long."""
    whole = 2 ** (heads.bit_length() - 1)
    row = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return row + [2.0 ** (-4 * (i + 1) / whole) for i in range(0, 2 * whole, 2)][: heads - whole]


def _distances(spec: EncoderSpec, source: Source, max_len: int) -> torch.Tensor:
    """MPNet's bias [Hq, 2 max_len - 1] by distance from query to key."""
    table = source.tensor(f"{spec.names.relative}.weight").float()
    apart = torch.arange(1 - max_len, max_len)
    half = spec.num_buckets // 2
    exact, far = half // 2, apart.abs()
    scale = math.log(FARTHEST / exact)
    large = exact + (torch.log(far.clamp(min=1).float() / exact) / scale * (half - exact)).long()
    bucket = torch.where(far < exact, far, large.clamp(max=half - 1)) + half * (apart > 0)
    return table[bucket.to(table.device)].T.contiguous()
