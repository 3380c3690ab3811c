"""Tiny checkpoints with random weights, made and written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 256

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 40, "head_dim": 16}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 24, "num_hidden_layers": 6},
    ),
}
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **_FACTORS}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_NO_KV_HEADS = {"num_key_value_heads": None}
_NO_WIDTH = {**_NO_KV_HEADS, "intermediate_size": None}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
NATIVE |= {
    "phi3": ("phi3", {"sliding_window": 40}),
    "phi4": ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": _LONGROPE, "tie_word_embeddings": True,
                      "original_max_position_embeddings": 1024}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 40, "num_hidden_layers": 4, "rope_parameters": {
        "full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "granite": ("granite", _GRANITE),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 40}),
    "glm": ("glm", {"head_dim": 32}),
    "glm4": ("glm4", {"head_dim": 16}),
    "starcoder2": ("starcoder2", {"sliding_window": 40}),
    "gemma": ("gemma", {"head_dim": 16}),
    "stablelm": ("stablelm", {"head_dim": 16, "use_qkv_bias": True}),
    "stablelm2": ("stablelm", {"use_parallel_residual": True, "num_attention_heads": 2}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 40, "num_hidden_layers": 4, "logit_scale": 0.5}),
    "gpt_neox": ("gpt_neox", {**_NO_KV_HEADS, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
    "pythia": ("gpt_neox", {**_NO_KV_HEADS, "use_parallel_residual": False}),
    "gpt2": ("gpt2", {**_NO_WIDTH, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024}),
    "opt": ("opt", {**_NO_WIDTH, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("falcon", {**_NO_WIDTH, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon7b": ("falcon", {**_NO_WIDTH, "multi_query": True, "bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40}),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False,
                                "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite_moe": ("granitemoe", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 40,
                            "rope_parameters": {**_YARN, "truncate": False}}),
}  # fmt: skip
_GROUPED = {
    **_MOE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "num_hidden_layers": 3,
}
_LATENT = {
    **_GROUPED,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
_DEEP_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
NATIVE |= {
    "glm4_moe": ("glm4_moe", {**_GROUPED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {
        **_LATENT, "q_lora_rank": 48, "mlp_layer_types": ["dense", "dense", "sparse"], "n_group": 1, "topk_group": 1,
    }),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "q_lora_rank": 48, "rope_parameters": _DEEP_YARN}),
}  # fmt: skip
# What every token passes is the shared MLP; none of the layers is one of mamba.
_GRANITE4 = {**_GRANITE, "layer_types": ["attention"] * 3, "shared_intermediate_size": 80}
NATIVE |= {
    "granite4": ("granitemoehybrid", {**_GRANITE4, "num_local_experts": 0, "num_experts_per_tok": 0,
                                      "position_embedding_type": "rope", "tie_word_embeddings": True,
                                      "embedding_multiplier": 1.5}),
    "granite4_unturned": ("granitemoehybrid", {**_GRANITE4, "num_local_experts": 0, "attention_bias": True}),
    "granite4_moe": ("granitemoehybrid", {**_GRANITE4, "num_local_experts": 4, "num_experts_per_tok": 2,
                                          "position_embedding_type": "nope"}),
    "granite_moe_shared": ("granitemoeshared", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2,
                                                "shared_intermediate_size": 80}),
}  # fmt: skip
# The first three layers attend within chunks, the last to everything; every other layer has experts.
_LLAMA4 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
    "floor_scale": 16,
    "attn_scale": 0.3,
}
NATIVE |= {
    "llama4": ("llama4_text", {**_LLAMA4, "num_experts_per_tok": 1, "rope_parameters": _LLAMA3}),
    "llama4_dense": ("llama4_text", {**_LLAMA4, "num_experts_per_tok": 3, "moe_layers": [1], "use_qk_norm": False}),
}  # fmt: skip
# Together these need everything from the kernels: for tests that are too expensive for all families.
KERNEL_FAMILIES = ["llama", "gemma2", "gemma3", "olmo3", "cohere2", "opt", "qwen2_moe", "gpt_oss", "deepseek_v3"]
# The rule for which layers have a sliding window differs for each.
_SLIDES = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}
SLIDING: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}_slides": (NATIVE[name][0], NATIVE[name][1] | _SLIDES) for name in ("qwen3", "qwen2_moe", "qwen3_moe")
}
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2_scaled": (
        "gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "scale_attn_by_inverse_layer_idx": True}
    ),
    "phi": ("phi", {}),
    "olmo": ("olmo", {}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def config_of(model_type: str, changes: dict[str, Any]) -> Any:
    """The configuration as transformers completes it."""
    return AutoConfig.for_model(model_type, **{**_COMMON, **changes})


def make_model(model_type: str, changes: dict[str, Any], seed: int = 7, auto: Any = AutoModelForCausalLM) -> Any:
    """A model with varied greedy continuations: weights are scaled up until logits differ clearly.

    `auto` is transformers' class that finds the model's.
    """
    torch.manual_seed(seed)
    config = config_of(model_type, changes)
    model = auto.from_config(config, attn_implementation="eager").eval()
    # A large tied embedding makes a model repeat its last token; Gemma multiplies its embedding by 8 here.
    embedding = 1.0 if not config.tie_word_embeddings else 0.04 if "gemma" in model_type else 0.12
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, embedding if "embed" in name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: Any, path: Path, dtype: torch.dtype | None = None, **kwargs: Any) -> Path:
    (model if dtype is None else model.to(dtype)).save_pretrained(path, **kwargs)
    return path


def prompts(count: int = 8, longest: int = 90) -> list[list[int]]:
    """Prompts of mixed lengths around block and tile boundaries."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 15, 16, 17, 33, 64, 65, longest][:count]
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
