"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (arXiv 2503.19786).

All scale embeddings by sqrt(hidden size) and store norm weights minus one. The later two norm each branch before and
after, and alternate local and global layers. Gemma 2 caps scores and logits; Gemma 3 norms heads and uses different
rotary angles for local and global layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pagoda_worker.checkpoints.config_reader import GATED, ConfigReader
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.rope_fields import LLAMA_ROPE, RopeDefaults, read_rope, read_two_ropes
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MlpShape, both_ways
from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of

NAMES = Names(
    norms={
        "attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
)


def _gemma_fields(config: ConfigReader) -> dict[str, Any]:
    common = common_fields(config)
    bias = config.take("attention_bias", bool, False)
    return common | {
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_offset": 1.0,
        "embed_scale": common["hidden_size"] ** 0.5,
        "final_softcap": config.maybe_positive("final_logit_softcapping"),
    }


def _layers(
    config: ConfigReader, period: int, ropes: Callable[[ConfigReader, int], Sequence[RopeShape]]
) -> tuple[LayerSpec, ...]:
    """Every `period`-th layer is global; `ropes` gives the global layers' rope and, if different, the local layers'."""
    attention = replace(
        attention_of(config),
        scale=config.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=config.maybe_positive("attn_logit_softcapping"),
    )
    window, layers = config.size("sliding_window"), range(config.size("num_hidden_layers"))
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in layers]
    mlp = mlp_of(config, "hidden_activation", "hidden_act")
    return layers_of(config.layer_windows(window, kinds), attention, mlp, *ropes(config, attention.head_dim))


def read_gemma(config: ConfigReader) -> DecoderSpec:
    attention = attention_of(config)
    # The first releases say gelu but mean the tanh approximation, which all others name.
    activation = config.activation("hidden_activation", "hidden_act", known=GATED | {"gelu": "gelu_tanh"})
    mlp = MlpShape(width=config.size("intermediate_size"), activation=activation)
    windows = (None,) * config.size("num_hidden_layers")
    layers = layers_of(windows, attention, mlp, read_rope(config, attention.head_dim))
    return DecoderSpec(**_gemma_fields(config), layers=layers)


def read_gemma2(config: ConfigReader) -> DecoderSpec:
    layers = _layers(config, 2, lambda config, head_dim: [read_rope(config, head_dim)])
    return DecoderSpec(**_gemma_fields(config), names=NAMES, layers=layers)


def read_gemma3(config: ConfigReader) -> DecoderSpec:
    config.choice("use_bidirectional_attention", False)
    return _gemma3(config)


def _gemma3(config: ConfigReader) -> DecoderSpec:
    period = config.maybe_size("sliding_window_pattern") or config.maybe_size("_sliding_window_pattern") or 6
    layers = _layers(config, period, _global_and_local)
    return DecoderSpec(**_gemma_fields(config), names=NAMES, layers=layers, head_norms=True)


def read_gemma3_text(config: ConfigReader) -> DecoderSpec:
    """The model without its output matrix. EmbeddingGemma (arXiv 2509.20354) attends both ways, half a window each."""
    spec = _gemma3(config)
    if not config.take("use_bidirectional_attention", bool, False):
        return spec
    return both_ways(replace(spec, layers=tuple(replace(one, attention=_halved(one.attention)) for one in spec.layers)))


def _halved(attention: AttentionShape) -> AttentionShape:
    return attention if attention.window is None else replace(attention, window=attention.window // 2 + 1)


def _global_and_local(config: ConfigReader, head_dim: int) -> tuple[RopeShape, RopeShape]:
    return read_two_ropes(config, head_dim, LLAMA_ROPE, RopeDefaults(theta_field="rope_local_base_freq"))
