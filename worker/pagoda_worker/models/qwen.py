"""Qwen2 (arXiv 2407.10671): biased queries, keys and values. Qwen3 (arXiv 2505.09388): normed query and key heads."""

from __future__ import annotations

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.llama import common_fields, one_rope


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window`."""
    window, full = config.maybe_size("sliding_window"), config.take("max_window_layers", int, 28)
    if not config.take("use_sliding_window", bool, False):
        window = None
    layers = range(config.size("num_hidden_layers"))
    sliding = ["sliding_attention" if window is not None and i >= full else "full_attention" for i in layers]
    return config.layer_windows(window, sliding)


def read_qwen2(config: ConfigReader) -> DecoderSpec:
    common = common_fields(config)
    return DecoderSpec(
        **common,
        **one_rope(config, common["head_dim"]),
        windows=_windows(config),
        activation=config.activation("hidden_act"),
        qkv_bias=True,
        tied=config.take("tie_word_embeddings", bool, False),
    )


def read_qwen3(config: ConfigReader) -> DecoderSpec:
    common = common_fields(config, default_head_dim=128)
    bias = config.take("attention_bias", bool, False)
    return DecoderSpec(
        **common,
        **one_rope(config, common["head_dim"]),
        windows=_windows(config),
        activation=config.activation("hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        tied=config.take("tie_word_embeddings", bool, False),
    )
