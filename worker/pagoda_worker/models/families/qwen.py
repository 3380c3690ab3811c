"""Qwen2 (arXiv 2407.10671): biased queries, keys and values. Qwen3 (arXiv 2505.09388): normed query and key heads."""

from __future__ import annotations

from collections.abc import Callable

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.rope_fields import read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of

Slides = Callable[[int, int], bool]
"""Whether the layer of this number slides under `use_sliding_window`, given `max_window_layers`."""


def from_there_on(layer: int, full: int) -> bool:
    return layer >= full


def _windows(config: ConfigReader, slides: Slides) -> tuple[int | None, ...]:
    window, full = None, config.take("max_window_layers", int, 28)
    if config.take("use_sliding_window", bool, False):
        window = config.maybe_size("sliding_window")
    else:
        config.ignore("sliding_window")  # some files then set it to 0
    layers = range(config.size("num_hidden_layers"))
    sliding = ["sliding_attention" if window is not None and slides(i, full) else "full_attention" for i in layers]
    return config.layer_windows(window, sliding)


def _layers(config: ConfigReader, slides: Slides) -> tuple[LayerSpec, ...]:
    attention = attention_of(config)
    return layers_of(
        _windows(config, slides), attention, mlp_of(config, "hidden_act"), read_rope(config, attention.head_dim)
    )


def read_qwen2(config: ConfigReader, slides: Slides = from_there_on) -> DecoderSpec:
    return DecoderSpec(**common_fields(config), layers=_layers(config, slides), qkv_bias=True)


def read_qwen3(config: ConfigReader, slides: Slides = from_there_on) -> DecoderSpec:
    bias = config.take("attention_bias", bool, False)
    return DecoderSpec(
        **common_fields(config),
        layers=_layers(config, slides),
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
    )
