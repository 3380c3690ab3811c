"""Olmo 2 (arXiv 2501.00656) and Olmo 3: norms follow the branches, and queries and keys are normed as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.rope_fields import LLAMA_ROPE, read_rope, read_two_ropes
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of

NAMES = Names(norms={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"})


def _olmo(config: ConfigReader, windows: Sequence[int | None], *ropes: RopeShape) -> DecoderSpec:
    bias = config.take("attention_bias", bool, False)
    return DecoderSpec(
        **common_fields(config),
        names=NAMES,
        layers=layers_of(windows, attention_of(config), mlp_of(config, "hidden_act"), *ropes),
        qkv_bias=bias,
        out_bias=bias,
        width_norms=True,
    )


def read_olmo2(config: ConfigReader) -> DecoderSpec:
    rope = read_rope(config, attention_of(config).head_dim)
    return _olmo(config, (None,) * config.size("num_hidden_layers"), rope)


def read_olmo3(config: ConfigReader) -> DecoderSpec:
    layers = range(config.size("num_hidden_layers"))
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in layers]
    windows = config.layer_windows(config.size("sliding_window"), kinds)
    return _olmo(config, windows, *read_two_ropes(config, attention_of(config).head_dim, LLAMA_ROPE, LLAMA_ROPE))
