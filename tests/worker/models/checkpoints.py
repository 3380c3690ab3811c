"""Tiny checkpoints with random weights, made by transformers and written as it writes them."""

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
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024}),
    "gpt_neox": ("gpt_neox", {}),
    "stablelm": ("stablelm", {}),
    "olmo2": ("olmo2", {}),
    "cohere2": ("cohere2", {"sliding_window": 40}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "num_experts": 4}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 40, "rope_parameters": _LLAMA3}),
}


def make_model(model_type: str, changes: dict[str, Any], seed: int = 7) -> Any:
    """A model whose greedy continuations wander: weights are scaled up until logits differ clearly."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
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
