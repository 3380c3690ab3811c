"""Defaults of fields missing in config.json, by architecture, as in transformers' configuration classes.

Only those that differ from Llama's, which are in the readers. A field that is null is not missing: it has no default,
and its reader decides what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GEMMA: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}
_GEMMA3: dict[str, Any] = _GEMMA | {
    "num_key_value_heads": 4, "sliding_window": 4096, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0
}  # fmt: skip
_GLM: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "GemmaForCausalLM": {
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16
    },
    "Gemma2ForCausalLM": _GEMMA | {
        "num_key_value_heads": 4, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3TextModel": _GEMMA3,
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
    "SmolLM3ForCausalLM": {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "Starcoder2ForCausalLM": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "StableLmForCausalLM": {"num_key_value_heads": 32},
    "CohereForCausalLM": {"tie_word_embeddings": True, "rope_theta": 500_000.0},
    "Cohere2ForCausalLM": {"tie_word_embeddings": True, "sliding_window": 4096},
    "FalconForCausalLM": {"tie_word_embeddings": True},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "Qwen2MoeForCausalLM": {"num_key_value_heads": 16, "sliding_window": 4096},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "sliding_window": 4096},
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5},
    "GraniteMoeHybridForCausalLM": {"shared_intermediate_size": 1024},
    "GptOssForCausalLM": {
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128
    },
    "Llama4ForCausalLM": {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0
    },
    "Glm4MoeForCausalLM": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "first_k_dense_replace": 1
    },
    "Glm4MoeLiteForCausalLM": {
        "rms_norm_eps": 1e-5, "q_lora_rank": 768, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    },
    "DeepseekV2ForCausalLM": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "DeepseekV3ForCausalLM": {
        "q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}  # fmt: skip


def completed(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of this architecture's config.json, completed by its defaults."""
    return {**DEFAULTS.get(architecture, {}), **fields}
