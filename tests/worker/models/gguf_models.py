"""Tiny checkpoints as converters write them in GGUF: tensors renamed and rearranged, config.json as key-value pairs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file
from tests.gguf_files import GgufFile, Stored, demo_pairs, demo_tensors, gguf_name, interleaved, stored

FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
ONLY_AFTER = {name: FOUR_NORMS[name] for name in ("post_attention_layernorm", "post_feedforward_layernorm")}
SHARED = {
    f"mlp.shared_expert{plural}.{part}_proj": f"ffn_{part}_shexp"
    for plural in ("", "s")
    for part in ("gate", "up", "down")
} | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
OTHERS = {
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "glm4moe": SHARED | {"post_attention_layernorm": "post_attention_norm"},
    "deepseek2": SHARED | {
        "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    },
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "gemma2": FOUR_NORMS, "gemma3": FOUR_NORMS, "olmo2": ONLY_AFTER, "qwen2moe": SHARED,
    "granitemoe": {"block_sparse_moe.router.layer": "ffn_gate_inp"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}  # fmt: skip
LIKE_LLAMA = ("llama", "granite", "granitemoe", "smollm3")  # converters interleave their queries and keys
BARE = {".self_attn.sinks": "attn_sinks.weight", ".mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
EXPERT_PARTS = {
    "w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"
}  # fmt: skip
FUSED = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.(input|output)_linear\.weight")
STACKED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales|)")
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": [],
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def write_gguf(
    directory: Path,
    config: Any,
    arch: str,
    path: Path,
    kind: str = "F32",
    pairs: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, Stored | None] = MappingProxyType({}),
) -> Path:
    """Write the safetensors checkpoint of a transformers `config` as a GGUF file of architecture `arch`.

    `pairs` (keys without the architecture's name) and `tensors` replace or extend the generated ones; None removes.
    """
    held = {name: one for name, one in (_tensors(directory, config, arch, kind) | dict(tensors)).items() if one}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turning = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "llama3":
        held["rope_freqs.weight"] = stored(_llama3_factors(rope, head_dim))
    if rope["rope_type"] == "longrope":
        for name in ("long", "short"):
            held[f"rope_factors_{name}.weight"] = stored(torch.tensor(rope[f"{name}_factor"]))
    top = {"general.architecture": arch} | VOCABULARY
    top["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(config.vocab_size)]
    said = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        **_epsilon(config), "rope.dimension_count": turning,
        "rope.freq_base": float(rope["rope_theta"]), **FIELDS.get(arch, lambda config, rope: {})(config, rope),
        **pairs,
    }  # fmt: skip
    return GgufFile(top | {f"{arch}.{name}": value for name, value in said.items() if value is not None}, held).write(
        path
    )


def _epsilon(config: Any) -> dict[str, float]:
    if hasattr(config, "rms_norm_eps"):
        return {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    means = getattr(config, "layer_norm_eps", None) or config.norm_epsilon
    return {"attention.layer_norm_epsilon": means}


def _experts(config: Any, rope: Any) -> dict[str, Any]:
    if not hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        return {}
    return {"expert_count": getattr(config, "num_local_experts", None) or config.num_experts,
            "expert_used_count": config.num_experts_per_tok}  # fmt: skip


def _phi3(config: Any, rope: Any) -> dict[str, Any]:
    said = {"attention.sliding_window": config.sliding_window or 0}
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        magnitude = math.sqrt(1 + math.log(rope["factor"]) / math.log(original))
        said |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": magnitude}
    return said


def _granite(config: Any, rope: Any) -> dict[str, Any]:
    return _experts(config, rope) | {
        "attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
    }  # fmt: skip


def _olmo2(config: Any, rope: Any) -> dict[str, Any]:
    if not hasattr(config, "sliding_window"):
        return {}
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    said = {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": slides}
    return said | _yarn(rope) | {"rope.freq_base_swa": float(rope["rope_theta"])}


def _yarn(rope: Any) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }  # fmt: skip


def _behind_dense(config: Any, rope: Any) -> dict[str, Any]:
    kinds = getattr(config, "mlp_layer_types", None)
    return {
        "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": kinds.count("dense") if kinds else config.first_k_dense_replace,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
        "expert_weights_norm": getattr(config, "norm_topk_prob", False),
    }  # fmt: skip


def _deepseek2(config: Any, rope: Any) -> dict[str, Any]:
    said = _behind_dense(config, rope) | ({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {})
    if rope["rope_type"] == "yarn":
        said |= _yarn(rope) | {"rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}
    return said | {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank, "rope.dimension_count": config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
    }  # fmt: skip


FIELDS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "llama": lambda config, rope: _experts(config, rope)
    | ({"attention.sliding_window": config.sliding_window} if getattr(config, "sliding_window", None) else {}),
    "qwen3moe": lambda config, rope: _experts(config, rope)
    | {"expert_feed_forward_length": config.moe_intermediate_size},
    "gemma2": lambda config, rope: {
        "attention.sliding_window": config.sliding_window, "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    },
    "gemma3": lambda config, rope: {"attention.sliding_window": config.sliding_window},
    "phi3": _phi3,
    "gpt-oss": lambda config, rope: _experts(config, rope)
    | _yarn(rope)
    | {"attention.sliding_window": config.sliding_window, "expert_feed_forward_length": config.intermediate_size},
    "glm4moe": _behind_dense,
    "deepseek2": _deepseek2,
    "command-r": lambda config, rope: {"logit_scale": config.logit_scale},
    "cohere2": lambda config, rope: {
        "logit_scale": config.logit_scale, "attention.sliding_window": config.sliding_window,
    },
    "granite": _granite,
    "granitemoe": _granite,
    "olmo2": _olmo2,
    "olmoe": _experts,
    "qwen2moe": lambda config, rope: _experts(config, rope)
    | {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    },
}  # fmt: skip


def _tensors(directory: Path, config: Any, arch: str, kind: str) -> dict[str, Stored]:
    others = OTHERS.get(arch, {})
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch in LIKE_LLAMA else {}
    found: dict[str, Stored] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            layer, expert, part = match.groups()
            experts.setdefault(f"blk.{layer}.ffn_{EXPERT_PARTS[part]}_exps.weight", {})[int(expert)] = tensor
            continue
        if match := STACKED.fullmatch(name):
            found |= _stacked(*match.groups(), tensor, tensors, kind)
            continue
        if whole := next((whole for end, whole in BARE.items() if name.endswith(end)), None):
            found[f"blk.{name.split('.')[2]}.{whole}"] = stored(tensor)
            continue
        if name.endswith(".kv_b_proj.weight"):
            found |= _of_heads(name.split(".")[2], tensor, config, kind)
            continue
        if match := FUSED.fullmatch(name):
            layer, which = match.groups()
            parts = zip(("gate", "up"), tensor.chunk(2, 1), strict=True) if which == "input" else [("down", tensor)]
            found |= {f"blk.{layer}.ffn_{part}_exps.weight": stored(rows.contiguous(), kind) for part, rows in parts}
            continue
        part = name.split(".")[-2]
        tensor = tensor.squeeze() if part == "shared_expert_gate" else tensor
        tensor = interleaved(tensor, heads[part]) if part in heads else tensor
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        found[gguf_name(name, others)] = stored(tensor, kind)
    for name, of_layer in experts.items():
        found[name] = stored(torch.stack([of_layer[i] for i in range(len(of_layer))]), kind)
    return found


def _of_heads(layer: str, both: torch.Tensor, config: Any, kind: str) -> dict[str, Stored]:
    """The matrices from latents to keys and to values, split; the one for keys is transposed."""
    plain, heads = config.qk_nope_head_dim, config.num_attention_heads
    keys, values = both.view(heads, -1, both.shape[1]).split([plain, config.v_head_dim], 1)
    return {
        f"blk.{layer}.attn_k_b.weight": stored(keys.mT.contiguous(), kind),
        f"blk.{layer}.attn_v_b.weight": stored(values.contiguous(), kind),
    }


def _stacked(
    layer: str, which: str, what: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor], kind: str
) -> dict[str, Stored]:
    """gpt-oss' experts: interleaved gate and up are split, and every block is preceded by its scale."""
    parts = [("gate", slice(0, None, 2)), ("up", slice(1, None, 2))] if which == "gate_up" else [("down", slice(None))]
    if what == "_bias":
        return {f"blk.{layer}.ffn_{part}_exps.bias": stored(tensor[:, rows]) for part, rows in parts}
    if what == "":
        return {f"blk.{layer}.ffn_{part}_exps.weight": stored(tensor.mT[:, rows], kind) for part, rows in parts}
    if what == "_scales":
        return {}
    codes = torch.stack((tensor & 0xF, tensor >> 4), -1).flatten(-2)
    halves = codes[..., :16] | codes[..., 16:] << 4
    scales = tensors[f"model.layers.{layer}.mlp.experts.{which}_proj_scales"].unsqueeze(-1)
    blocks = torch.cat((scales, halves), -1)
    return {
        f"blk.{layer}.ffn_{part}_exps.weight": Stored(
            blocks[:, rows].contiguous().numpy().tobytes(), (*blocks[:, rows].shape[:2], 32 * blocks.shape[2]), "MXFP4"
        )
        for part, rows in parts
    }


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """The factor that divides each frequency."""
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).double() / head_dim)
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / plain)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - blend) / rope["factor"] + blend)


def demo_parts(directory: Path) -> Path:
    """The bundled model in three parts, with its metadata in the first."""
    tensors = list(demo_tensors("BF16").items())
    paths = [directory / f"demo-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        GgufFile((demo_pairs() if not number else {}) | split, dict(tensors[number::3])).write(path)
    return paths[0]
