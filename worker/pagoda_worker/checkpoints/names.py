"""The names of a decoder's tensors in published checkpoints, as data: families may differ in names alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Names:
    """The first names are below `root`, `head` stands alone, the others are within a layer.

    Attributes:
        norms: Role of a norm -> its name. "attention" and "mlp" come before the branch of that name, "after_attention"
            and "after_mlp" after it; a role without a name has no norm.
        qkv: Queries, keys and values, or the one matrix that holds them.
        latent_up: The one matrix from a latent to keys and values, head by head; or two: from a head's query to the
            latent [latent, key] and from the latent to its value [value, latent].
        up: Gate and up, or the one matrix that holds them; without a gate, up alone.
        expert_up, expert_down: Of the experts of a layer; "{}" stands for an expert's number. Names without it are of
            tensors with the matrices of all, [experts, outputs, inputs]; "_bias" is appended for their biases.
        expert_inputs_first: Such a tensor is [experts, inputs, outputs].
        expert_turns: Gate and up are interleaved in it.
        favour: Bias added to experts' scores only for choosing among them.
        sinks: Of attention; one number for each head.
        grouped: Rows of `qkv` are ordered by KV head: its query heads, its key, its value.
        transposed: Matrices are stored [inputs, outputs].
    """

    root: str = "model."
    layers: str = "layers"
    embed: str = "embed_tokens"
    positions: str = "embed_positions"
    final_norm: str = "norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    query_down: str = "self_attn.q_a_proj"
    query_latent_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: tuple[str, ...] = ("self_attn.kv_b_proj",)
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    expert_inputs_first: bool = False
    expert_turns: bool = False
    favour: str = "mlp.gate.e_score_correction_bias"
    sinks: str = "self_attn.sinks"
    shared_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
    )
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    grouped: bool = False
    transposed: bool = False

    def top(self, part: str) -> str:
        return self.root + part

    def in_layer(self, layer: int, part: str) -> str:
        return f"{self.root}{self.layers}.{layer}.{part}"


LLAMA = Names()
HEADS = frozenset({"lm_head", "embed_out"})  # names of output matrices, whatever the family
