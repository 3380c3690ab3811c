"""Cohere Command R and R7B: one LayerNorm before parallel attention and MLP; rotary pairs are neighbours.

In the second generation (arXiv 2504.00698), layers with full attention have no rotation, and the others slide.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of

NAMES = Names(norms={"attention": "input_layernorm"})
ROPE = RopeDefaults(interleaved=True)
# Fields of older exports, and the values they must have.
SAID = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}


def _cohere(config: ConfigReader, windows: Sequence[int | None], *ropes: RopeShape | None) -> DecoderSpec:
    bias = config.take("attention_bias", bool, False)
    for field, value in SAID.items():
        config.choice(field, value)
    common = common_fields(config, eps="layer_norm_eps")
    reach = config.size("model_max_length", common["max_positions"])  # Command R's trained length
    return DecoderSpec(
        **common | {"max_positions": reach},
        names=NAMES,
        layers=layers_of(windows, attention_of(config), mlp_of(config, "hidden_act"), *ropes),
        qkv_bias=bias,
        out_bias=bias,
        norm_kind="layer",
        parallel=True,
        logit_scale=config.positive("logit_scale", 0.0625),
    )


def read_cohere(config: ConfigReader) -> DecoderSpec:
    rope = read_rope(config, attention_of(config).head_dim, ROPE)
    config.choice("use_qk_norm", False)
    return _cohere(config, (None,) * config.size("num_hidden_layers"), rope)


def read_cohere2(config: ConfigReader) -> DecoderSpec:
    rope = read_rope(config, attention_of(config).head_dim, ROPE)
    period = config.size("sliding_window_pattern", 4)
    config.choice("layer_switch", period)
    config.choice("rotary_pct", 1.0, 1)
    config.ignore("use_parallel_embedding")  # parallelism over devices in training
    layers = range(config.size("num_hidden_layers"))
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in layers]
    return _cohere(config, config.layer_windows(config.size("sliding_window"), kinds), None, rope)
