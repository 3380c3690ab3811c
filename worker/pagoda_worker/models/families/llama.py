"""Llama (arXiv 2307.09288, 2407.21783) and Mistral (arXiv 2310.06825), which adds a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagoda_worker.checkpoints.config_reader import UNGATED, ConfigReader, invalid
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.rope_fields import LLAMA_ROPE, RopeDefaults, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MlpShape, MoeShape
from pagoda_worker.kernels.ops import AttentionShape


def common_fields(config: ConfigReader, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Fields that all families here name alike, except that of `eps`."""
    return {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "norm_eps": config.positive(eps, 1e-6 if eps == "rms_norm_eps" else 1e-5),
        "max_positions": config.size("max_position_embeddings"),
        "tied": config.take("tie_word_embeddings", bool, False),
    }


def attention_of(config: ConfigReader) -> AttentionShape:
    """For every layer, without its window. Without a head size of their own, heads divide the hidden size evenly."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    return attention_shape(hidden, heads, config.size("num_key_value_heads", heads), config.maybe_size("head_dim"))


def attention_shape(hidden: int, heads: int, kv_heads: int, head_dim: int | None = None) -> AttentionShape:
    head_dim = head_dim or _even_share(hidden, heads)
    if heads % kv_heads or head_dim % 2:
        raise invalid("config.json", f"{heads} heads do not divide into {kv_heads} KV heads of {head_dim} dimensions")
    return AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def _even_share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise invalid("config.json", f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    return hidden // heads


def mlp_of(config: ConfigReader, *activations: str, bias: bool = False) -> MlpShape:
    """For every layer; `activations` are the fields that may name one."""
    return MlpShape(width=config.size("intermediate_size"), activation=config.activation(*activations), bias=bias)


def ungated_mlp(config: ConfigReader, width: int, activation: str, default: str, bias: bool) -> MlpShape:
    """For every layer; `activation` is the field that may name one."""
    kind = config.activation(activation, known=UNGATED, default=default)
    return MlpShape(width=width, activation=kind, bias=bias, gated=False)


def layers_of(
    windows: Sequence[int | None], attention: AttentionShape, mlp: MlpShape | MoeShape, *ropes: RopeShape | None
) -> tuple[LayerSpec, ...]:
    """A layer per window, otherwise alike; of two `ropes`, sliding layers use the second."""
    return tuple(
        LayerSpec(attention=replace(attention, window=window), rope=ropes[0 if window is None else -1], mlp=mlp)
        for window in windows
    )


def read_llama(config: ConfigReader) -> DecoderSpec:
    attention, bias = attention_of(config), config.take("attention_bias", bool, False)
    mlp = mlp_of(config, "hidden_act", bias=config.take("mlp_bias", bool, False))
    windows = (None,) * config.size("num_hidden_layers")
    return DecoderSpec(
        **common_fields(config),
        layers=layers_of(windows, attention, mlp, read_rope(config, attention.head_dim)),
        qkv_bias=bias,
        out_bias=bias,
    )


def read_mistral(config: ConfigReader) -> DecoderSpec:
    return DecoderSpec(**common_fields(config), layers=sliding_layers(config, mlp_of(config, "hidden_act")))


def sliding_layers(config: ConfigReader, mlp: MlpShape, rope: RopeDefaults = LLAMA_ROPE) -> tuple[LayerSpec, ...]:
    """Layers that all slide, if `sliding_window` is set."""
    attention, window = attention_of(config), config.maybe_size("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    windows = config.layer_windows(window, [kind] * config.size("num_hidden_layers"))
    return layers_of(windows, attention, mlp, read_rope(config, attention.head_dim, rope))
