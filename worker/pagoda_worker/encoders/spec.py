"""An encoder as data: everything in which the families of text encoders differ, and the names of their tensors.

A layer is attention and an MLP, each a branch that is added to its input; norms come before the branches or after the
sums. Positions are learned, rotary, or a bias of scores, which is learned or fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.kernels.ops import AttentionShape

FARTHEST = 128  # distance in tokens beyond which MPNet's bias is constant
BUCKETS = range(4, 4 * FARTHEST)  # allowed bucket counts: with others the formula divides by 0


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of tensors below the model's own prefix; those of a layer follow `layer` and its number.

    `qkv` may be one matrix of all three, `up` of a gated MLP both gate and up; `up_first`: in that one, up comes first.
    """

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embed_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    up_first: bool = False
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    relative: str = ""


@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    attention: AttentionShape
    rope: RopeShape | None = None
    attention_norm: bool = True  # ModernBERT norms its embeddings instead of the first attention's input


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """`first_place` is where the learned positions start in their table: RoBERTa's first lines are for padding."""

    names: Names
    vocab_size: int
    hidden_size: int
    width: int  # of the MLP
    activation: str
    norm_eps: float
    max_positions: int
    layers: tuple[EncoderLayer, ...]
    gated: bool = False
    pre_norm: bool = False
    norm_bias: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    num_types: int = 0
    num_places: int = 0  # lines of the table of learned positions; 0: no table
    first_place: int = 0
    num_buckets: int = 0  # of MPNet's bias by distance; 0: no bias
    alibi: bool = False  # scores fall with distance, at a rate per head

    @property
    def biased_by_distance(self) -> bool:
        return bool(self.num_buckets) or self.alibi

    @property
    def ropes(self) -> tuple[RopeShape, ...]:
        """The distinct rotary shapes of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def norms(self) -> list[str]:
        """All norms."""
        names = [self.names.embed_norm, *filter(None, [self.names.final_norm])]
        for index, layer in enumerate(self.layers):
            names += [self.in_layer(index, self.names.attention_norm)] * layer.attention_norm
            names.append(self.in_layer(index, self.names.mlp_norm))
        return names

    def in_layer(self, index: int, name: str) -> str:
        return f"{self.names.layer}{index}.{name}"


def linear_layers(spec: EncoderSpec) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of every matrix of a layer."""
    names, hidden, width = spec.names, spec.hidden_size, spec.width
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(len(spec.layers)):
        outputs = 3 * hidden // len(names.qkv), (1 + spec.gated) * width // len(names.up)
        found = dict.fromkeys(names.qkv, (outputs[0], hidden)) | dict.fromkeys(names.up, (outputs[1], hidden))
        found |= {names.out: (hidden, hidden), names.down: (hidden, width)}
        shapes |= {spec.in_layer(index, name): shape for name, shape in found.items()}
    return shapes


def biased(spec: EncoderSpec) -> set[str]:
    """Parts of a layer whose matrices have a bias."""
    names = spec.names
    kinds = ((spec.qkv_bias, names.qkv), (spec.out_bias, (names.out,)), (spec.up_bias, names.up))
    return {part for has, parts in (*kinds, (spec.down_bias, (names.down,))) if has for part in parts}


def expected_tensors(spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor below the prefix, without those of heads."""
    names, hidden = spec.names, spec.hidden_size
    tables = {names.words: spec.vocab_size, names.positions: spec.num_places, names.types: spec.num_types}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, hidden) for name, size in tables.items() if size}
    with_bias = biased(spec)
    for name, shape in linear_layers(spec).items():
        shapes[f"{name}.weight"] = shape
        if name.removeprefix(names.layer).partition(".")[2] in with_bias:
            shapes[f"{name}.bias"] = shape[:1]
    for norm in spec.norms:
        shapes |= {f"{norm}.{part}": (hidden,) for part in ("weight", "bias")[: 1 + spec.norm_bias]}
    if spec.num_buckets:
        shapes[f"{names.relative}.weight"] = (spec.num_buckets, spec.layers[0].attention.num_heads)
    return shapes
