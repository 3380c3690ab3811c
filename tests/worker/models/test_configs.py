"""config.json: both spellings are read alike, and nothing that changes the arithmetic is ignored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.fakes_spec import windows_of

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.rope import inverse_frequencies
from pagoda_worker.checkpoints.spec import DecoderSpec, expected_tensors
from pagoda_worker.loading.model import native_spec

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
KINDS = [
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Olmo3", "Granite", "SmolLM3", "Glm",
    "Glm4", "Starcoder2", "Cohere", "Cohere2", "GPTNeoX", "OPT", "Falcon", "Gemma", "StableLm", "GraniteMoeHybrid",
]  # fmt: skip
DEEP: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "n_group": 4, "topk_group": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 1}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}

_LAYER_NORM = {"rms_norm_eps": None}
_GPT = {**_LAYER_NORM, "num_key_value_heads": None}
OWN: dict[str, dict[str, Any]] = {
    "Starcoder2": _LAYER_NORM,
    "StableLm": _LAYER_NORM,
    "Cohere": _LAYER_NORM,
    "Cohere2": _LAYER_NORM,
    "GPTNeoX": _GPT,
    "OPT": {**_GPT, "hidden_act": None, "intermediate_size": None, "ffn_dim": 96},
    "Falcon": {**_GPT, "hidden_act": None, "intermediate_size": None},
    "GraniteMoeHybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0},
}


def read(kind: str = "Llama", **changes: Any) -> DecoderSpec:
    return native_spec(f"{kind}ForCausalLM", BASE | OWN.get(kind, {}) | changes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        ),
        ({"torch_dtype": "bfloat16", "rope_scaling": None}, {"dtype": "bfloat16"}),
    ],
)
def test_both_spellings(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(**old) == read(**new)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type 'ntk'"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs factor"),
        ("Llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su'"),
        ("SmolLM3", {"no_rope_layers": [1, 0, 2, 1]}, "'no_rope_layers' must have 0 or 1 for each of 4 layers"),
        ("Cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("Cohere2", {"use_parallel_block": False}, "use_parallel_block=False"),
        ("Cohere2", {"rotary_pct": 0.5}, "rotary_pct=0.5"),
        ("Cohere2", {"layer_switch": 3}, "layer_switch=3"),
        ("OPT", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ("OPT", {"word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
        ("Mixtral", {}, "'num_local_experts' is missing"),
        (
            "GraniteMoeHybrid",
            {"layer_types": ["mamba", "mamba", "attention", "moe"]},
            r"'layer_types' has layers without attention \(2 of 'mamba', 1 of 'moe'\)",
        ),
        ("GraniteMoeHybrid", {"layer_types": ["attention"] * 3}, "'layer_types' names 3 of 4 layers"),
        ("GraniteMoeHybrid", {"layer_types": None}, "'layer_types' is missing"),
        ("GraniteMoeHybrid", {"num_local_experts": None}, "'num_local_experts' is missing"),
        ("GraniteMoeHybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not one of"),
        ("GraniteMoeHybrid", {"normalization_function": "layernorm"}, "normalization_function='layernorm'"),
        ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 8.0}, "not supported natively: clip_qkv"),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("DeepseekV3", {**DEEP, "topk_method": "greedy"}, "topk_method='greedy'"),
        ("Glm4MoeLite", {**DEEP, "mlp_layer_types": ["sparse", "dense"]}, "'mlp_layer_types' must name every layer"),
        ("DeepseekV2", {**DEEP, "norm_topk_prob": True}, "norm_topk_prob=True"),
        ("DeepseekV2", {**DEEP, "kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ("DeepseekV3", {**DEEP, "attention_bias": True}, "attention_bias=True"),
        ("Glm4Moe", {**DEEP, "moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("Llama4", {**EXPERTS, "layer_types": ["sliding_attention"] * 4}, "every layer as full or chunked"),
        ("Llama4", {**EXPERTS, "moe_layers": ["1"]}, "'moe_layers' must be layer numbers"),
        ("Llama4", {**EXPERTS, "no_rope_layers": [1, 0]}, "'no_rope_layers' must have 0 or 1 for each of 4"),
        ("Llama4", {**EXPERTS, "attn_temperature_tuning": 3}, "attn_temperature_tuning=3"),
        (
            "Mistral",
            {"is_causal": False, "sliding_window": 64},
            "'is_causal': bidirectional sliding windows are not supported",
        ),
        ("DeepseekV3", {**DEEP, "is_causal": False}, "latents, chunks and sinks need causal attention"),
        ("Falcon", {"alibi": True}, "not supported natively: alibi"),
        (
            "Falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "'parallel_attn'=False is not supported",
        ),
        ("Phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8}}, "'longrope' needs long_factor"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        (
            "Llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}},
            "not supported natively: beta_fast",
        ),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Llama", {"partial_rotary_factor": 0.5}, "not supported natively: partial_rotary_factor"),
        ("Llama", {"logit_scale": 2.0, "no_rope_layers": [1]}, "not supported natively: logit_scale, no_rope_layers"),
        ("Llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("Llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("Llama", {"hidden_size": None}, "'hidden_size' is missing"),
        ("Mistral", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("Mistral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "'sliding_window' is not set"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3", {"rope_parameters": {"full_attention": {}}}, "no 'sliding_attention'"),
        ("Unheard", {}, "'UnheardForCausalLM' has no native implementation"),
    ],
)
def test_what_is_refused_is_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=message):
        read(kind, **changes)


NAN, INFINITY = float("nan"), float("inf")
IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"hidden_size": "64"}, "'hidden_size' must be of type int, got '64'"),
    ("Llama", {"hidden_size": 64.0}, "'hidden_size' must be of type int, got 64.0"),
    ("Llama", {"hidden_size": True}, "'hidden_size' must be of type int, got True"),
    ("Llama", {"num_attention_heads": 0}, "'num_attention_heads' must be from 1 to .*, got 0"),
    ("Llama", {"num_key_value_heads": 3}, "4 heads do not divide into 3 KV heads"),
    ("Llama", {"num_key_value_heads": 8}, "4 heads do not divide into 8 KV heads"),
    ("DeepseekV3", {**DEEP, "topk_group": 1}, "3 of 8 experts cannot be chosen from 'topk_group'=1 of 'n_group'=4"),
    ("DeepseekV3", {**DEEP, "n_group": 3}, "'n_group'=3 groups"),
    ("DeepseekV3", {**DEEP, "n_group": 8, "topk_group": 4}, "'n_group'=8 groups"),
    ("Glm4Moe", {**DEEP, "topk_group": 5}, "'topk_group'=5 of 'n_group'=4"),
    ("DeepseekV2", {**DEEP, "kv_lora_rank": 33}, "kv_lora_rank=33 and qk_rope_head_dim=16 must be even"),
    ("Llama", {"hidden_size": 65}, "hidden_size=65 is not a multiple of num_attention_heads=4"),
    ("Llama", {"head_dim": 15}, "of 15 dimensions"),
    ("Llama", {"num_hidden_layers": 10**9}, "'num_hidden_layers' must be from 1 to 4096, got 1000000000"),
    ("Llama", {"vocab_size": 10**4000}, "'vocab_size' must be .* got an integer of 13288 bits"),
    ("Llama", {"max_position_embeddings": -1}, "'max_position_embeddings' .* got -1"),
    ("Llama", {"rms_norm_eps": NAN}, "'rms_norm_eps' must be .* got nan"),
    ("Llama", {"rms_norm_eps": -1e-6}, "'rms_norm_eps' .* got -1e-06"),
    ("Llama", {"rms_norm_eps": 10**400}, "'rms_norm_eps' must be of type float"),
    ("Llama", {"rope_theta": -1.0}, "'rope_theta' .* got -1.0"),
    ("Llama", {"rope_theta": INFINITY}, "'rope_theta' .* got inf"),
    ("Llama", {"rope_parameters": {"rope_theta": 0}}, "'rope_theta' .* got 0"),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": "4"}}, "'factor' must be of type float, got '4'"),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be from .* got 0"),
    (
        "Llama",
        {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        "'high_freq_factor' must be above",
    ),
    (
        "Llama",
        {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": -3}},
        "'original_max_position_embeddings' .* got -3",
    ),
    ("Mistral", {"sliding_window": 0}, "'sliding_window' must be from 1 to .*, got 0"),
    ("Mistral", {"sliding_window": -4}, "'sliding_window' .* got -4"),
    ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' .* got 0"),
    ("Gemma2", {"head_dim": 16, "attn_logit_softcapping": -1.0}, "'attn_logit_softcapping' .* got -1"),
    ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 0.0}, "'final_logit_softcapping' .* got 0"),
    ("Gemma3", {"head_dim": 16, "sliding_window_pattern": -6}, "'sliding_window_pattern' .* got -6"),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "'num_experts_per_tok' must be from 1 to 4, got 5"),
    ("Mixtral", {"num_local_experts": 1025, "num_experts_per_tok": 2}, "'num_local_experts' must be from 1 to 1024"),
    (
        "Mixtral",
        {"num_local_experts": 1000, "num_experts_per_tok": 2, "num_hidden_layers": 100},
        "'num_local_experts'=1000 per layer exceeds 65536 experts in all",
    ),
    ("Mixtral", {"num_local_experts": 10**9, "num_experts_per_tok": 2}, "'num_local_experts' must be from 1 to 1024"),
    ("Olmoe", {"num_experts": 10**9, "num_experts_per_tok": 2}, "'num_experts' must be from 1 to 1024"),
    ("DeepseekV3", {**DEEP, "n_routed_experts": 10**9}, "'n_routed_experts' must be from 1 to 1024"),
    ("DeepseekV3", {**DEEP, "num_experts_per_tok": 10**9}, "'num_experts_per_tok' must be from 1 to 8"),
    ("Qwen3Moe", {**QWEN_EXPERTS, "mlp_only_layers": [1, 99]}, "'mlp_only_layers' must be from 0 to 3, got 99"),
    ("Qwen3Moe", {**QWEN_EXPERTS, "mlp_only_layers": [-1]}, "'mlp_only_layers' must be from 0 to 3, got -1"),
    ("Llama4", {**EXPERTS, "moe_layers": [4]}, "'moe_layers' must be from 0 to 3, got 4"),
    ("GptOss", {**EXPERTS, "experts_per_token": 2}, "'experts_per_token'=2, but 'num_experts_per_tok'=1"),
    ("Granite", {"residual_multiplier": 0.0}, "'residual_multiplier' must be from .* got 0"),
    ("Glm4", {"partial_rotary_factor": 0.01}, "rotates 1 of 128 dimensions"),
    ("GPTNeoX", {"rotary_pct": 2.0}, "rotates 32 of 16 dimensions"),
    ("Llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 0.5}}, "'rope_theta' must be above 1"),
    (
        "Phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "'short_factor' must have 8 numbers",
    ),
    (
        "Phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}},
        r"'short_factor\[0\]' must be from .* got 0",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), IMPOSSIBLE)
def test_what_no_model_can_mean_is_no_matter_for_the_fallback(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(kind, **changes)


def test_heads_without_a_size_have_that_of_their_family() -> None:
    sizes = {kind: {layer.attention.head_dim for layer in read(kind).layers} for kind in KINDS}
    assert sizes["Gemma"] == sizes["Gemma2"] == sizes["Gemma3"] == {256}
    assert sizes["Qwen3"] == sizes["Glm"] == sizes["Glm4"] == {128}
    assert sizes["Qwen2"] == sizes["Llama"] == {16}


KINDS_OF_ROPE = ["linear", "llama3", "yarn", "longrope", "dynamic"]
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 1, 2**63, 10**400, 1e308, 0.0]))
VALUES = st.one_of(
    NUMBERS, st.none(), st.booleans(), st.text(max_size=5), st.lists(NUMBERS, max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "sliding_attention"]), NUMBERS),
    st.builds(lambda kind, rest: {"rope_type": kind} | rest, st.sampled_from([*KINDS_OF_ROPE, "default", 3, []]),
              st.dictionaries(st.sampled_from([*LLAMA3, "rope_theta", "beta_fast", "short_factor", "attention_factor"]),
                              st.one_of(NUMBERS, st.text(max_size=3)))),
)  # fmt: skip
NAMES = [
    *BASE, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types",
    "max_window_layers", "use_sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "sliding_window_pattern", "rope_local_base_freq", "hidden_activation", "attention_bias",
    "tie_word_embeddings", "pretraining_tp", "unheard_of", "partial_rotary_factor", "original_max_position_embeddings",
    "residual_multiplier", "no_rope_layers", "num_kv_heads", "rotary_pct", "logit_scale", "ffn_hidden_size",
]  # fmt: skip


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_any_file_is_read_or_refused_by_name(kind: str, changes: dict[str, Any]) -> None:
    try:
        spec = read(kind, **changes)
    except (UnsupportedConfig, CheckpointError) as error:
        message = str(error)
    else:
        message = ""
        check(spec)
    assert not message or (message.startswith("config.json") and len(message) < 500)


def check(spec: DecoderSpec) -> None:
    assert all(layer.attention.num_heads % layer.attention.num_kv_heads == 0 for layer in spec.layers)
    assert all(one.theta > 0 and one.factor > 0 for one in spec.ropes)
    assert all(window is None or window > 0 for window in windows_of(spec))
    small = [replace(one, head_dim=min(one.head_dim, 512), turning=min(one.turning, 512)) for one in spec.ropes]
    frequencies = [inverse_frequencies(one, spec.max_positions) for one in small if one.kind != "longrope"]
    assert all(torch.isfinite(one).all() for one in frequencies)


def test_fields_that_are_off_do_no_harm() -> None:
    assert read(sliding_window=None, use_thing=False, auto_map={"AutoModel": "x.Y"}, attention_dropout=0.1) == read()


def test_windows() -> None:
    assert windows_of(read("Mistral", sliding_window=40)) == (40,) * 4
    assert windows_of(read("Mistral", sliding_window=None)) == (None,) * 4
    assert windows_of(read("Mistral")) == (4096,) * 4
    sliding = {"sliding_window": 40, "max_window_layers": 3}
    assert windows_of(read("Qwen2", **sliding, use_sliding_window=True)) == (None, None, None, 40)
    assert windows_of(read("Qwen2", **sliding, use_sliding_window=False)) == (None,) * 4
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "use_sliding_window": True}
    shared = {"shared_expert_intermediate_size": 32}
    assert windows_of(read("Qwen2Moe", **sliding, **experts, **shared)) == (40, None, 40, None)
    assert windows_of(read("Qwen3Moe", **sliding, **experts)) == (40,) * 4
    assert windows_of(read("Gemma2", sliding_window=40)) == (40, None, 40, None)
    gemma3 = read("Gemma3", sliding_window=40, sliding_window_pattern=3)
    assert windows_of(gemma3) == (40, 40, None, 40)
    assert [layer.rope.theta for layer in gemma3.layers] == [1e4, 1e4, 1e6, 1e4]
    assert [rope.theta for rope in gemma3.ropes] == [1e4, 1e6]


def test_gemma3_in_the_older_spelling() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read("Gemma3", rope_local_base_freq=1e4, rope_theta=1e6, rope_scaling=scaling)
    local, whole = {"rope_type": "default", "rope_theta": 1e4}, {**scaling, "rope_theta": 1e6}
    assert old == read("Gemma3", rope_parameters={"sliding_attention": local, "full_attention": whole})


def test_tensors_of_a_checkpoint() -> None:
    shapes = expected_tensors(read(attention_bias=True, tie_word_embeddings=True))
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (32, 64)
    assert shapes["model.layers.0.self_attn.o_proj.bias"] == (64,)
    assert "lm_head.weight" not in shapes
    assert len(shapes) == 2 + 4 * (7 + 4 + 2)
