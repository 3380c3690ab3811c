"""Architectures of GGUF files: the name of each in config.json, and its particular fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagoda_proto.model_files.gguf import Gguf
from pagoda_proto.model_files.gguf_keys import Keys, rope_scaling

SLIDING, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
EXPERT_WIDTH, SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
LOGIT_SCALE = "logit_scale"
MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", LOGIT_SCALE: "logits_scaling",
}  # fmt: skip
SHARED_COUNT, DENSE_COUNT, GUESSING = "expert_shared_count", "leading_dense_block_count", "nextn_predict_layers"
GATING, SUM_IS_ONE, EXPERT_SCALE = "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
BEHIND_DENSE = frozenset(
    {EXPERT_WIDTH, SHARED_COUNT, DENSE_COUNT, GUESSING, GATING, SUM_IS_ONE, EXPERT_SCALE, GROUPS, GROUPS_USED}
)
SOFTMAX, SIGMOID = 1, 2  # values of `expert_gating_func`
FAVOUR = ".exp_probs_b.bias"  # the end of a tensor's name
LATENT_RANK, QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
KEY_LENGTH, VALUE_LENGTH = "attention.key_length_mla", "attention.value_length_mla"
SHARPENING = "rope.scaling.yarn_log_multiplier"
MEANS = ("attention.layer_norm_epsilon", "layer_norm_eps")  # of norms that subtract the mean


@dataclass(frozen=True, kw_only=True)
class Family:
    """The peculiarities of one architecture.

    Attributes:
        architecture: Its name in config.json.
        fields: Its further fields of config.json.
        keys: Keys that it may have besides the common ones.
        epsilon: The epsilon of its norms: the key, and the field of config.json.
    """

    architecture: str
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    fields: Callable[[Keys], dict[str, Any]] = lambda keys: {}
    keys: frozenset[str] = frozenset()


def _attention_bias(keys: Keys) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.gguf.tensors}


def _biases(keys: Keys) -> dict[str, Any]:
    return _attention_bias(keys) | {"mlp_bias": "blk.0.ffn_up.bias" in keys.gguf.tensors}


def _llama(keys: Keys) -> dict[str, Any]:
    fields = _biases(keys)
    window = keys.whole(SLIDING, 0)
    if window:
        fields |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    if not keys.whole("expert_count", 0):
        return fields
    return fields | {"architectures": ["MixtralForCausalLM"]} | _chosen(keys)


def _chosen(keys: Keys) -> dict[str, Any]:
    return {"num_local_experts": keys.whole("expert_count"), "num_experts_per_tok": keys.whole("expert_used_count")}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    said = {"moe_intermediate_size": keys.whole(EXPERT_WIDTH), "norm_topk_prob": False}
    return _chosen(keys) | said | {"shared_expert_intermediate_size": keys.whole(SHARED_WIDTH)}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return _chosen(keys) | {"moe_intermediate_size": keys.whole(EXPERT_WIDTH), "norm_topk_prob": True}


def _granite(keys: Keys) -> dict[str, Any]:
    if not keys.gguf.take(f"{keys.prefix}.rope.scaling.finetuned", bool, True):
        raise keys.gguf.bad(f"'{keys.prefix}.rope.scaling.finetuned' turns RoPE off, which is not supported")
    return _biases(keys) | _multipliers(keys)


def _multipliers(keys: Keys) -> dict[str, Any]:
    return {field: keys.number(key, 1.0) for key, field in MULTIPLIERS.items()}


def _granite_moe(keys: Keys) -> dict[str, Any]:
    return _attention_bias(keys) | _multipliers(keys) | _chosen(keys)


def _olmo2(keys: Keys) -> dict[str, Any]:
    """Olmo 2, or Olmo 3 if there is a sliding window."""
    fields, window = _attention_bias(keys), keys.whole(SLIDING, 0)
    if window == 0:
        return fields
    theta = keys.number("rope.freq_base", 10_000.0)
    if keys.number(LOCAL_BASE, theta) != theta:
        raise keys.gguf.bad(f"'{keys.prefix}.{LOCAL_BASE}' other than that of full-attention layers is not supported")
    windows = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window}
    return fields | windows | (_sliding_pattern(keys) if keys.has(PATTERN) else {})


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    """Its YaRN does not truncate dimensions, which GGUF files do not say. Without `rope_scaling`, YaRN is implied."""
    scaling = rope_scaling(keys)
    rope = scaling | {"truncate": False} if scaling else {"rope_type": "default"}
    said = {"sliding_window": keys.whole(SLIDING), "rope_scaling": rope}
    return _attention_bias(keys) | _chosen(keys) | said


def _smollm3(keys: Keys) -> dict[str, Any]:
    """Every fourth layer has no RoPE, which GGUF files do not say."""
    return _biases(keys) | {"no_rope_layer_interval": 4}


def _phi3(keys: Keys) -> dict[str, Any]:
    window = keys.whole(SLIDING, 0)
    return _turning(keys) | {
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length", 0) or None,
        "sliding_window": window or None,
    }


def _glm4(keys: Keys) -> dict[str, Any]:
    if keys.whole(GUESSING, 0):
        raise keys.gguf.bad(f"'{keys.prefix}.{GUESSING}' in a model without experts is not supported")
    return _attention_bias(keys) | _turning(keys)


def _turning(keys: Keys) -> dict[str, Any]:
    """The part of a head with RoPE, given even if it is all, because these families have another default."""
    return {"partial_rotary_factor": keys.whole("rope.dimension_count", keys.head_dim) / keys.head_dim}


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    if keys.whole(GATING, SIGMOID) != SIGMOID:
        raise keys.gguf.bad(f"'{keys.prefix}.{GATING}' other than {SIGMOID} is not supported")
    norms = "blk.0.attn_q_norm.weight" in keys.gguf.tensors
    return _attention_bias(keys) | _turning(keys) | _behind_dense(keys) | {"use_qk_norm": norms}


def _behind_dense(keys: Keys) -> dict[str, Any]:
    """Layers with experts after dense ones. `block_count` includes the layers after both that predict draft tokens."""
    guessing = keys.whole(GUESSING, 0)
    return {
        "num_hidden_layers": keys.whole("block_count") - guessing,
        "num_nextn_predict_layers": guessing,
        "n_routed_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole(EXPERT_WIDTH),
        "n_shared_experts": keys.whole(SHARED_COUNT, 0) or None,
        "first_k_dense_replace": keys.whole(DENSE_COUNT, 0),
        "n_group": keys.whole(GROUPS, 1),
        "topk_group": keys.whole(GROUPS_USED, 1),
        "norm_topk_prob": keys.gguf.take(f"{keys.prefix}.{SUM_IS_ONE}", bool, False),
        "routed_scaling_factor": keys.number(EXPERT_SCALE, 1.0),
    }


def _deepseek2(keys: Keys) -> dict[str, Any]:
    """V3 adds a bias to the experts' scores, V2 does not. Newer files give sizes of latents and of heads separately."""
    turning, latents = keys.whole("rope.dimension_count"), keys.has(KEY_LENGTH)
    key = keys.whole(KEY_LENGTH if latents else "attention.key_length")
    favoured = any(name.endswith(FAVOUR) for name in keys.gguf.tensors)
    if keys.whole(GATING, wanted := SIGMOID if favoured else SOFTMAX) != wanted:
        raise keys.gguf.bad(f"'{keys.prefix}.{GATING}' other than {wanted} is not supported here")
    scoring = {"topk_method": "noaux_tc"} if favoured else {"topk_method": "group_limited_greedy"}
    return (
        _behind_dense(keys)
        | scoring
        | {
            "architectures": ["DeepseekV3ForCausalLM" if favoured else "DeepseekV2ForCausalLM"],
            "kv_lora_rank": keys.whole(LATENT_RANK),
            "q_lora_rank": keys.whole(QUERY_RANK, 0) or None,
            "qk_rope_head_dim": turning,
            "qk_nope_head_dim": key - turning,
            "v_head_dim": keys.whole(VALUE_LENGTH if latents else "attention.value_length"),
            "rope_scaling": _sharpened(keys),
            "num_key_value_heads": None,
            "partial_rotary_factor": None,
            "head_dim": None,
        }
    )


def _sharpened(keys: Keys) -> dict[str, Any] | None:
    """A file has a tenth of `mscale_all_dim`, in float32, but not `mscale`, which has the same value in all models."""
    scaling = rope_scaling(keys)
    if scaling is None or not keys.has(SHARPENING):
        return scaling
    both = round(10 * keys.number(SHARPENING), 6)
    return scaling | {"mscale": both, "mscale_all_dim": both}


def _cohere(keys: Keys) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in keys.gguf.tensors:
        raise keys.gguf.bad("norms of queries and keys are not supported with this architecture")
    return {"logit_scale": keys.number(LOGIT_SCALE)}


def _cohere2(keys: Keys) -> dict[str, Any]:
    pattern = _sliding_pattern(keys) if keys.has(PATTERN) else {"sliding_window_pattern": 4}
    return _cohere(keys) | pattern | {"sliding_window": keys.whole(SLIDING)}


def _starcoder2(keys: Keys) -> dict[str, Any]:
    """The window, which files may omit, is the same in all published sizes."""
    biased = "blk.0.attn_q.bias" in keys.gguf.tensors
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": biased, "sliding_window": keys.whole(SLIDING, 4096)}


def _gemma(keys: Keys) -> dict[str, Any]:
    return {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys) -> dict[str, Any]:
    return _gemma(keys) | {
        "sliding_window": keys.whole(SLIDING, 4096),
        "attn_logit_softcapping": keys.number(SCORE_CAP, 50.0),
        "final_logit_softcapping": keys.number(LOGIT_CAP, 30.0),
        "query_pre_attn_scalar": _query_scalar(keys, 46),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    local = keys.number(LOCAL_BASE, 10_000.0)
    return (
        _gemma(keys)
        | _sliding_pattern(keys)
        | {
            "sliding_window": keys.whole(SLIDING),
            "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": local,
            "final_logit_softcapping": keys.number(LOGIT_CAP, 0.0) or None,
            "query_pre_attn_scalar": _query_scalar(keys, 62),
        }
    )


def _sliding_pattern(keys: Keys) -> dict[str, Any]:
    """Which layers use the sliding window: a period with one full layer, or a flag per layer."""
    key = f"{keys.prefix}.{PATTERN}"
    if not keys.gguf.is_array(key):
        return {"sliding_window_pattern": keys.whole(PATTERN, 6)}
    slides = keys.gguf.items(key, bool) or []
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in slides]}


def _query_scalar(keys: Keys, layers: int) -> float:
    """Not in the file. It is the head size, except in the largest model, which is recognised by its `layers`."""
    if keys.whole("block_count") == layers:
        return keys.whole("embedding_length") / keys.whole("attention.head_count")
    return float(keys.head_dim)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", fields=_llama, keys=frozenset({SLIDING})),
    "qwen2": Family(architecture="Qwen2ForCausalLM"),
    "qwen2moe": Family(
        architecture="Qwen2MoeForCausalLM", fields=_qwen2_moe, keys=frozenset({EXPERT_WIDTH, SHARED_WIDTH})
    ),
    "qwen3": Family(architecture="Qwen3ForCausalLM"),
    "qwen3moe": Family(architecture="Qwen3MoeForCausalLM", fields=_qwen3_moe, keys=frozenset({EXPERT_WIDTH})),
    "gemma": Family(architecture="GemmaForCausalLM", fields=_gemma),
    "gemma2": Family(architecture="Gemma2ForCausalLM", fields=_gemma2, keys=frozenset({SLIDING, SCORE_CAP, LOGIT_CAP})),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        fields=_gemma3,
        keys=frozenset({SLIDING, PATTERN, LOGIT_CAP, LOCAL_BASE}),
    ),
    "phi3": Family(architecture="Phi3ForCausalLM", fields=_phi3, keys=frozenset({SLIDING})),
    "gpt-oss": Family(architecture="GptOssForCausalLM", fields=_gpt_oss, keys=frozenset({SLIDING, EXPERT_WIDTH})),
    "granite": Family(architecture="GraniteForCausalLM", fields=_granite, keys=frozenset(MULTIPLIERS)),
    "granitemoe": Family(architecture="GraniteMoeForCausalLM", fields=_granite_moe, keys=frozenset(MULTIPLIERS)),
    "olmo2": Family(architecture="Olmo2ForCausalLM", fields=_olmo2, keys=frozenset({SLIDING, PATTERN, LOCAL_BASE})),
    "olmoe": Family(architecture="OlmoeForCausalLM", fields=_chosen),
    "smollm3": Family(architecture="SmolLM3ForCausalLM", fields=_smollm3),
    "glm4": Family(architecture="Glm4ForCausalLM", fields=_glm4, keys=frozenset({GUESSING})),
    "glm4moe": Family(architecture="Glm4MoeForCausalLM", fields=_glm4_moe, keys=BEHIND_DENSE),
    "deepseek2": Family(
        architecture="DeepseekV2ForCausalLM",
        fields=_deepseek2,
        keys=BEHIND_DENSE | {LATENT_RANK, QUERY_RANK, KEY_LENGTH, VALUE_LENGTH, SHARPENING},
    ),
    "command-r": Family(architecture="CohereForCausalLM", fields=_cohere, keys=frozenset({LOGIT_SCALE}), epsilon=MEANS),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        fields=_cohere2,
        keys=frozenset({LOGIT_SCALE, SLIDING, PATTERN}),
        epsilon=MEANS,
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        fields=_starcoder2,
        keys=frozenset({SLIDING}),
        epsilon=(MEANS[0], "norm_epsilon"),
    ),
}


def family_of(gguf: Gguf) -> str:
    """The file's architecture, one of FAMILIES. Raises BadGguf for any other."""
    name = gguf.take("general.architecture", str)
    if name not in FAMILIES:
        raise gguf.bad(f"architecture {name[:64]!r} is not one of {', '.join(FAMILIES)}")
    return name
