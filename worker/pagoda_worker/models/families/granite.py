"""Granite 3 and 4: Llama with four multipliers, of embeddings, attention scores, branches and logits.

Those with experts merge gate and up. Granite 4 calls the MLP that every token passes shared, with or without experts;
of its models, those with attention in every layer are decoders.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig, shown
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope_fields import read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec, MlpShape, MoeShape
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of, read_llama
from pagoda_worker.models.families.moe import QWEN, routing_of

MERGED = "shared_mlp.input_linear"
DOWN = "shared_mlp.output_linear"
NAMES = Names(up=(MERGED,), down=DOWN)
EXPERTS = Names(
    router="block_sparse_moe.router.layer",
    expert_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
    shared_up=(MERGED,),
    shared_down=DOWN,
)
# As transformers 5 keeps them in memory, and writes them if told to keep its own names.
EXPERTS_FUSED = replace(
    EXPERTS,
    router="block_sparse_moe.router",
    expert_up=("block_sparse_moe.experts.gate_up_proj",),
    expert_down="block_sparse_moe.experts.down_proj",
)
# Each expert by itself, as in GGUF files.
EXPERTS_APART = replace(QWEN, shared_up=(MERGED,), shared_down=DOWN)
WITH_EXPERTS: dict[str, Any] = {"names": EXPERTS, "spellings": (EXPERTS_FUSED, EXPERTS_APART)}
ATTENTION = ("attention", "full_attention")  # by transformers' older name and its newer one
# Of layers that are refused; files have them even if no layer is one.
OF_MAMBA = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "time_step_min", "time_step_max",
)  # fmt: skip


def read_granite(config: ConfigReader) -> DecoderSpec:
    return _scaled(config, read_llama(config))


def read_granite_moe(config: ConfigReader) -> DecoderSpec:
    return _granite(config, _experts(config, None), **WITH_EXPERTS)


def read_granite_moe_shared(config: ConfigReader) -> DecoderSpec:
    """The shared MLP may be missing: its width is then 0."""
    shared = _shared(config) if config.maybe("shared_intermediate_size", int) else None
    return _granite(config, _experts(config, shared), **WITH_EXPERTS)


def read_granite_hybrid(config: ConfigReader) -> DecoderSpec:
    _check_attention_only(config)
    for name in (*OF_MAMBA, "init_method"):
        config.ignore(name)
    config.choice("normalization_function", "rmsnorm")
    turns = config.choice("position_embedding_type", "nope", "rope") == "rope"
    if config.take("num_local_experts", int):
        return _granite(config, _experts(config, _shared(config)), turns=turns, **WITH_EXPERTS)
    for name in ("intermediate_size", "num_experts_per_tok"):
        config.ignore(name)
    return _granite(config, _shared(config), turns=turns, names=NAMES)


def _check_attention_only(config: ConfigReader) -> None:
    """Raises UnsupportedConfig unless every layer has attention."""
    kinds, layers = config.take("layer_types", list), config.size("num_hidden_layers")
    others = Counter(shown(kind) for kind in kinds if kind not in ATTENTION)
    if others:
        told = ", ".join(f"{count} of {kind}" for kind, count in sorted(others.items())[:4])
        raise UnsupportedConfig(f"config.json: 'layer_types' has layers without attention ({told})")
    if len(kinds) != layers:
        raise UnsupportedConfig(f"config.json: 'layer_types' names {len(kinds)} of {layers} layers")


def _shared(config: ConfigReader) -> MlpShape:
    return MlpShape(width=config.size("shared_intermediate_size"), activation=config.activation("hidden_act"))


def _experts(config: ConfigReader, shared: MlpShape | None) -> MoeShape:
    mlp = mlp_of(config, "hidden_act")
    routing = routing_of(config, renormalised=True)
    return MoeShape(routing=routing, width=mlp.width, activation=mlp.activation, shared=shared)


def _granite(config: ConfigReader, mlp: MlpShape | MoeShape, *, turns: bool = True, **names: Any) -> DecoderSpec:
    """`names`: fields of the spec."""
    attention, bias = attention_of(config), config.take("attention_bias", bool, False)
    rope, windows = read_rope(config, attention.head_dim), (None,) * config.size("num_hidden_layers")
    spec = DecoderSpec(
        **common_fields(config),
        layers=layers_of(windows, attention, mlp, rope if turns else None),
        qkv_bias=bias,
        out_bias=bias,
        **names,
    )
    return _scaled(config, spec)


def _scaled(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """The spec with the multipliers of the file."""
    scale = config.positive("attention_multiplier", 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, attention=replace(layer.attention, scale=scale)) for layer in spec.layers),
        embed_scale=config.positive("embedding_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / config.positive("logits_scaling", 1.0),
    )
