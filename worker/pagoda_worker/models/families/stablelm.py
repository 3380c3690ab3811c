"""StableLM 2 (arXiv 2402.17834): Llama with LayerNorm; a quarter of every head rotates, branches may be parallel."""

from __future__ import annotations

from pagoda_worker.checkpoints.config_reader import ConfigReader
from pagoda_worker.checkpoints.names import LLAMA, Names
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import attention_of, common_fields, layers_of, mlp_of

ONE_NORM = Names(norms={"attention": "input_layernorm"})
ROPE = RopeDefaults(partial=0.25)


def read_stablelm(config: ConfigReader) -> DecoderSpec:
    attention, parallel = attention_of(config), config.take("use_parallel_residual", bool, False)
    windows = (None,) * config.size("num_hidden_layers")
    config.choice("qk_layernorm", False)
    return DecoderSpec(
        **common_fields(config, eps="layer_norm_eps"),
        names=ONE_NORM if parallel else LLAMA,
        layers=layers_of(windows, attention, mlp_of(config, "hidden_act"), read_rope(config, attention.head_dim, ROPE)),
        qkv_bias=config.take("use_qkv_bias", bool, False),
        norm_kind="layer",
        norm_bias=True,
        parallel=parallel,
    )
