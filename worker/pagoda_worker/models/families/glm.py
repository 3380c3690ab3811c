"""GLM-4 (arXiv 2406.12793): half of every head rotates, in neighbouring pairs; the 0414 models norm branches twice.

GLM-4.5 (arXiv 2508.06471) has experts, and rotates halves with one another like most families.
"""

from __future__ import annotations

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.deepseek import NAMES as EXPERT_NAMES
from pagoda_worker.models.families.deepseek import NAMES_FUSED, behind_dense, grouped_routing, guessing_layers
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of

NAMES = Names(up=("mlp.gate_up_proj",))
NAMES_0414 = Names(
    up=("mlp.gate_up_proj",),
    norms={
        "attention": "input_layernorm",
        "after_attention": "post_self_attn_layernorm",
        "mlp": "post_attention_layernorm",
        "after_mlp": "post_mlp_layernorm",
    },
)
ROPE = RopeDefaults(partial=0.5, interleaved=True)


def _glm(config: ConfigReader, names: Names) -> DecoderSpec:
    attention = attention_of(config)
    windows = (None,) * config.size("num_hidden_layers")
    return DecoderSpec(
        **common_fields(config),
        names=names,
        layers=layers_of(windows, attention, mlp_of(config, "hidden_act"), read_rope(config, attention.head_dim, ROPE)),
        qkv_bias=config.take("attention_bias", bool, True),
    )


def read_glm(config: ConfigReader) -> DecoderSpec:
    return _glm(config, NAMES)


def read_glm4(config: ConfigReader) -> DecoderSpec:
    return _glm(config, NAMES_0414)


def read_glm4_moe(config: ConfigReader) -> DecoderSpec:
    attention, bias = attention_of(config), config.take("attention_bias", bool, False)
    windows = (None,) * config.size("num_hidden_layers")
    rope = read_rope(config, attention.head_dim, RopeDefaults(partial=0.5))
    layers = layers_of(windows, attention, mlp_of(config, "hidden_act"), rope)
    return DecoderSpec(
        **common_fields(config),
        names=EXPERT_NAMES,
        spellings=(NAMES_FUSED,),
        layers=behind_dense(config, layers, grouped_routing(config, sigmoid=True)),
        qkv_bias=bias,
        head_norms=config.take("use_qk_norm", bool, False),
        unused_layers=guessing_layers(config),
    )
