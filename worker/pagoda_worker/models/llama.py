"""Llama (arXiv 2307.09288, 2407.21783) and Mistral (arXiv 2310.06825), which adds a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from pagoda_worker.checkpoints.config_reader import ConfigReader, invalid
from pagoda_worker.checkpoints.spec import DecoderSpec


def common_fields(config: ConfigReader, default_head_dim: int = 0) -> dict[str, Any]:
    """What all families here spell alike. Where heads have no size of their own, 0 shares out the hidden size."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.maybe_size("head_dim") or default_head_dim or _even_share(hidden, heads)
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise invalid("config.json", f"{heads} heads over {kv_heads} KV heads of {head_dim} dimensions do not divide")
    return {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.size("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": config.positive("rms_norm_eps", 1e-6),
        "max_positions": config.size("max_position_embeddings"),
        "attention_scale": head_dim**-0.5,
    }


def _even_share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise invalid("config.json", f"hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    return hidden // heads


def one_rope(config: ConfigReader, head_dim: int) -> dict[str, Any]:
    return {"ropes": (config.rope(head_dim),), "rope_of_layer": (0,) * config.size("num_hidden_layers")}


def read_llama(config: ConfigReader) -> DecoderSpec:
    common = common_fields(config)
    bias = config.take("attention_bias", bool, False)
    return DecoderSpec(
        **common,
        **one_rope(config, common["head_dim"]),
        windows=(None,) * config.size("num_hidden_layers"),
        activation=config.activation("hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.take("mlp_bias", bool, False),
        tied=config.take("tie_word_embeddings", bool, False),
    )


def read_mistral(config: ConfigReader) -> DecoderSpec:
    common = common_fields(config)
    window = config.maybe_size("sliding_window")
    layers = config.size("num_hidden_layers")
    return DecoderSpec(
        **common,
        **one_rope(config, common["head_dim"]),
        windows=config.layer_windows(window, ["full_attention" if window is None else "sliding_attention"] * layers),
        activation=config.activation("hidden_act"),
        tied=config.take("tie_word_embeddings", bool, False),
    )
