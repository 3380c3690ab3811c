"""Decoders before Llama: LayerNorm with biases, MLPs without a gate, and rotary or learned positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagoda_worker.checkpoints.config_reader import ConfigReader, UnsupportedConfig
from pagoda_worker.checkpoints.names import Names
from pagoda_worker.checkpoints.rope_fields import RopeDefaults, read_rope
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.models.families.llama import attention_shape, common_fields, layers_of, ungated_mlp

LAYER_NORMS: dict[str, Any] = {"norm_kind": "layer", "norm_bias": True}
NEOX = Names(
    root="gpt_neox.", embed="embed_in", final_norm="final_layer_norm", head="embed_out", grouped=True,
    qkv=("attention.query_key_value",), out="attention.dense", up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h",
)  # fmt: skip
NEOX_ROPE = RopeDefaults(partial=0.25, theta_field="rotary_emb_base", partial_field="rotary_pct")
GPT2 = Names(
    root="transformer.", layers="h", embed="wte", positions="wpe", final_norm="ln_f", transposed=True,
    qkv=("attn.c_attn",), out="attn.c_proj", up=("mlp.c_fc",), down="mlp.c_proj",
    norms={"attention": "ln_1", "mlp": "ln_2"},
)  # fmt: skip
OPT = Names(
    root="model.decoder.", final_norm="final_layer_norm", out="self_attn.out_proj", up=("fc1",), down="fc2",
    norms={"attention": "self_attn_layer_norm", "mlp": "final_layer_norm"},
)  # fmt: skip
OPT_NORM_EPS = 1e-5
FALCON = Names(
    root="transformer.", layers="h", embed="word_embeddings", final_norm="ln_f", grouped=True,
    qkv=("self_attention.query_key_value",), out="self_attention.dense", up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)  # fmt: skip


def read_gpt_neox(config: ConfigReader) -> DecoderSpec:
    """GPT-NeoX (arXiv 2204.06745) and Pythia: both branches read the stream, each through a norm of its own."""
    heads, bias = config.size("num_attention_heads"), config.take("attention_bias", bool, True)
    attention = attention_shape(config.size("hidden_size"), heads, heads)
    mlp = ungated_mlp(config, config.size("intermediate_size"), "hidden_act", "gelu", bias=True)
    windows = (None,) * config.size("num_hidden_layers")
    return DecoderSpec(
        **common_fields(config, eps="layer_norm_eps"),
        **LAYER_NORMS,
        names=NEOX,
        spellings=(replace(NEOX, head="lm_head"),),
        layers=layers_of(windows, attention, mlp, read_rope(config, attention.head_dim, NEOX_ROPE)),
        qkv_bias=bias,
        out_bias=bias,
        parallel=config.take("use_parallel_residual", bool, True),
    )


def read_gpt2(config: ConfigReader) -> DecoderSpec:
    hidden, positions = config.size("n_embd"), config.size("n_positions")
    attention = attention_shape(hidden, heads := config.size("n_head"), heads)
    config.choice("n_ctx", positions)
    config.choice("scale_attn_weights", True)
    for unused in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"):
        config.ignore(f"summary_{unused}")
    mlp = ungated_mlp(config, config.maybe_size("n_inner") or 4 * hidden, "activation_function", "gelu_new", bias=True)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        max_positions=positions,
        tied=config.take("tie_word_embeddings", bool, True),
        **LAYER_NORMS,
        names=GPT2,
        spellings=(replace(GPT2, root=""),),
        layers=layers_of((None,) * config.size("n_layer"), attention, mlp, None),
        qkv_bias=True,
        out_bias=True,
        learned_positions=True,
    )


def read_opt(config: ConfigReader) -> DecoderSpec:
    """OPT (arXiv 2205.01068), except the 350M model, which has its norms after the branches."""
    config.ignore("prefix")  # a prefix for prompts, which its tokenizer adds
    config.choice("do_layer_norm_before", True)
    config.choice("layer_norm_elementwise_affine", True)
    config.choice("word_embed_proj_dim", hidden := config.size("hidden_size"))
    heads, bias = config.size("num_attention_heads"), config.take("enable_bias", bool, True)
    mlp = ungated_mlp(config, config.size("ffn_dim"), "activation_function", "relu", bias)
    windows = (None,) * config.size("num_hidden_layers")
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        norm_eps=OPT_NORM_EPS,
        max_positions=config.size("max_position_embeddings"),
        tied=config.take("tie_word_embeddings", bool, True),
        **LAYER_NORMS,
        names=OPT,
        spellings=(replace(OPT, root="decoder."),),
        layers=layers_of(windows, attention_shape(hidden, heads, heads), mlp, None),
        qkv_bias=bias,
        out_bias=bias,
        learned_positions=True,
        position_offset=2,
    )


def read_falcon(config: ConfigReader) -> DecoderSpec:
    """Falcon (arXiv 2311.16867), except the models with ALiBi instead of positions."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias, newer = config.take("bias", bool, False), config.take("new_decoder_architecture", bool, False)
    one_kv, kv_heads = config.take("multi_query", bool, True), config.size("num_kv_heads", heads)
    attention = attention_shape(hidden, heads, kv_heads if newer else 1 if one_kv else heads)
    parallel = config.take("parallel_attn", bool, True)
    width = config.maybe_size("ffn_hidden_size") or 4 * hidden
    rope, windows = read_rope(config, attention.head_dim), (None,) * config.size("num_hidden_layers")
    return DecoderSpec(
        **common_fields(config, eps="layer_norm_epsilon"),
        **LAYER_NORMS,
        names=replace(FALCON, norms=_falcon_norms(config, newer, parallel)),
        layers=layers_of(windows, attention, ungated_mlp(config, width, "activation", "gelu", bias), rope),
        qkv_bias=bias,
        out_bias=bias,
        parallel=parallel,
    )


def _falcon_norms(config: ConfigReader, newer: bool, parallel: bool) -> dict[str, str]:
    norms = config.maybe("num_ln_in_parallel_attn", int) or (2 if newer else 1)
    if not parallel and not newer:
        return {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
    if not parallel or norms not in (1, 2 if newer else 1):
        raise UnsupportedConfig(
            f"config.json: 'num_ln_in_parallel_attn'={norms} with 'parallel_attn'={parallel} is not supported"
        )
    return {"attention": "ln_attn", "mlp": "ln_mlp"} if norms == 2 else {"attention": "input_layernorm"}
