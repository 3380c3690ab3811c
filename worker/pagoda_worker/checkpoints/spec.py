"""A decoder as data: everything in which the natively supported families differ.

`DecoderSpec` is what a config.json is read into and what `Decoder` is built from; weights are found by the names and
shapes it implies, so a checkpoint can be judged before a byte of it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.kernels.segments import num_segments


@dataclass(frozen=True, kw_only=True)
class MlpShape:
    """act(gate) * up [I], then down. `activation` is "silu" or "gelu_tanh"."""

    width: int  # I
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """In which layers of one model may differ: how they attend, by which angles, and what their MLP is."""

    attention: AttentionShape
    rope: RopeShape
    mlp: MlpShape


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False  # RMS norm of every query and key head
    branch_norms: bool = False  # Gemma: a norm also after attention and after the MLP
    norm_offset: float = 0.0  # Gemma stores norm weights minus one
    embed_scale: float | None = None
    final_softcap: float | None = None
    tied: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def segments(self) -> int:
        """Into how many fall the inputs of `OUT` and `DOWN`, of all layers alike; see `kernels.segments`."""
        attention = [layer.attention for layer in self.layers]
        attended = [one.num_heads * one.head_dim for one in attention]
        return num_segments(
            [*attended, *(layer.mlp.width for layer in self.layers)], [one.num_heads for one in attention]
        )

    @property
    def ropes(self) -> tuple[RopeShape, ...]:
        """All that layers turn by, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))


# Parts that one matrix is made of, in order; the names within a layer in the published checkpoints.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)
EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head"
# Buffers that older exports carry along; they hold nothing that config.json does not say.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".self_attn.bias")


def layer_name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def norm_parts(spec: DecoderSpec) -> dict[str, str]:
    """Role of a norm -> its name within a layer. `mlp` stands before the MLP, whatever the family calls it."""
    names = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
    if spec.branch_norms:
        names |= {
            "mlp": "pre_feedforward_layernorm",
            "after_attention": "post_attention_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
    return {role: f"{name}.weight" for role, name in names.items()}


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a checkpoint of this spec has."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (spec.vocab_size, spec.hidden_size), FINAL_NORM: (spec.hidden_size,)}
    if not spec.tied:
        shapes[f"{HEAD}.weight"] = (spec.vocab_size, spec.hidden_size)
    for index, layer in enumerate(spec.layers):
        shapes |= {layer_name(index, part): shape for part, shape in _layer_tensors(spec, layer).items()}
    return shapes


def linear_layers(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of every matrix that may be quantised; a tied head is none of its own."""
    shapes = {
        layer_name(index, part): shape
        for index, layer in enumerate(spec.layers)
        for part, shape in _layer_matrices(spec, layer).items()
    }
    return shapes if spec.tied else shapes | {HEAD: (spec.vocab_size, spec.hidden_size)}


def _layer_matrices(spec: DecoderSpec, layer: LayerSpec) -> dict[str, tuple[int, int]]:
    hidden, middle, attention = spec.hidden_size, layer.mlp.width, layer.attention
    attended, kept = (heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads))
    matrices = {part: (outputs, hidden) for part, outputs in zip(QKV, (attended, kept, kept), strict=True)}
    return matrices | {OUT[0]: (hidden, attended), DOWN[0]: (hidden, middle)} | dict.fromkeys(GATE_UP, (middle, hidden))


def _layer_tensors(spec: DecoderSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    hidden, matrices = spec.hidden_size, _layer_matrices(spec, layer)
    biased = (QKV if spec.qkv_bias else ()) + (OUT if spec.out_bias else ())
    biased += GATE_UP + DOWN if layer.mlp.bias else ()
    shapes: dict[str, tuple[int, ...]] = {f"{part}.weight": shape for part, shape in matrices.items()}
    shapes |= {f"{part}.bias": (matrices[part][0],) for part in biased}
    shapes |= dict.fromkeys(norm_parts(spec).values(), (hidden,))
    if spec.head_norms:
        shapes |= {f"self_attn.{name}.weight": (layer.attention.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes
