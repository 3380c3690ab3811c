"""From the metadata of a GGUF file to the config.json of the model it was made of.

A row per architecture says what config.json calls it and which of its fields have a name of their own. A key of the
architecture that is not known may change the arithmetic, so it is refused, as a field of config.json would be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagoda_proto.model_files.gguf import Gguf
from pagoda_proto.model_files.gguf_tokenizer import end_ids

QUANTISED = "bfloat16"  # what is computed in where the weights are whole numbers
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
LAST = 3  # a number of `pooling_type`

# Behind "<architecture>.": what all of them have, under the name that config.json has for it.
SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
KNOWN = {
    *SIZES, "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_attn_factor", "rope.scale_linear", "expert_count", "expert_used_count", "pooling_type",
    "attention.causal", "tensor_data_layout",
}  # fmt: skip
SLIDING, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
EXPERT_WIDTH, SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular. `keys`: that it may have besides KNOWN. `fields`: what config.json says besides."""

    architecture: str
    fields: Callable[[Keys], dict[str, Any]] = lambda keys: {}
    keys: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Keys:
    """The metadata of one architecture."""

    gguf: Gguf
    prefix: str

    def has(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.gguf.keys

    def whole(self, name: str, default: int | None = None) -> int:
        key = f"{self.prefix}.{name}"
        if self.gguf.is_array(key):  # a number for each layer, which only some converters write
            numbers = set(self.gguf.items(key, int) or ())
            if len(numbers) != 1:
                raise self.gguf.bad(f"{key!r} differs by layer, which is not supported")
            return numbers.pop()
        return self.gguf.take(key, int, default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.gguf.take(f"{self.prefix}.{name}", float, default)

    def text(self, name: str, default: str) -> str:
        return self.gguf.take(f"{self.prefix}.{name}", str, default)

    @property
    def head_dim(self) -> int:
        """Above 0, as is the number of heads."""
        heads = self.whole("attention.head_count")
        found = self.whole("attention.key_length", self.whole("embedding_length") // heads if heads > 0 else 0)
        if heads < 1 or found < 1:
            raise self.gguf.bad(f"{heads} heads of {found} dimensions are no attention")
        return found


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
        raise keys.gguf.bad(f"'{keys.prefix}.rope.scaling.finetuned' says that nothing turns, which is not supported")
    return _biases(keys) | _multipliers(keys)


def _multipliers(keys: Keys) -> dict[str, Any]:
    return {field: keys.number(key, 1.0) for key, field in MULTIPLIERS.items()}


def _granite_moe(keys: Keys) -> dict[str, Any]:
    return _attention_bias(keys) | _multipliers(keys) | _chosen(keys)


def _olmo2(keys: Keys) -> dict[str, Any]:
    """Olmo 3 has windows."""
    fields, window = _attention_bias(keys), keys.whole(SLIDING, 0)
    if window == 0:
        return fields
    theta = keys.number("rope.freq_base", 10_000.0)
    if keys.number(LOCAL_BASE, theta) != theta:
        raise keys.gguf.bad(f"'{keys.prefix}.{LOCAL_BASE}' other than that of layers that see all is not supported")
    windows = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window}
    return fields | windows | (_sliding_pattern(keys) if keys.has(PATTERN) else {})


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    """Its yarn goes by fractions of dimensions, which no file says."""
    scaling = _scaling(keys)
    said = {"sliding_window": keys.whole(SLIDING), "rope_scaling": scaling and scaling | {"truncate": False}}
    return _attention_bias(keys) | _chosen(keys) | said


def _smollm3(keys: Keys) -> dict[str, Any]:
    """No file says that every fourth layer's queries and keys do not turn."""
    return _biases(keys) | {"no_rope_layer_interval": 4}


def _phi3(keys: Keys) -> dict[str, Any]:
    window = keys.whole(SLIDING, 0)
    return {
        "partial_rotary_factor": keys.whole("rope.dimension_count", keys.head_dim) / keys.head_dim,
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length", 0) or None,
        "sliding_window": window or None,
    }


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
    """Every so many layers one sees all, or for each layer whether it slides."""
    key = f"{keys.prefix}.{PATTERN}"
    if not keys.gguf.is_array(key):
        return {"sliding_window_pattern": keys.whole(PATTERN, 6)}
    slides = keys.gguf.items(key, bool) or []
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in slides]}


def _query_scalar(keys: Keys, layers: int) -> float:
    """The file does not say it. It is the size of a head, but for the largest model, which is known by its `layers`."""
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
}


def family_of(gguf: Gguf) -> str:
    """A name of FAMILIES. Raises BadGguf for any other architecture."""
    name = gguf.take("general.architecture", str)
    if name not in FAMILIES:
        raise gguf.bad(f"architecture {name[:64]!r} is not one of {', '.join(FAMILIES)}")
    return name


def config_of(gguf: Gguf) -> dict[str, Any]:
    """What config.json would say. Raises BadGguf for what is missing, and for what nobody here knows."""
    name = family_of(gguf)
    family, keys = FAMILIES[name], Keys(gguf, name)
    known = {f"{name}.{key}" for key in KNOWN | family.keys}
    unknown = sorted(key for key in gguf.keys - known if key.startswith(f"{name}."))
    if unknown:
        raise gguf.bad(f"not supported: {', '.join(unknown[:8])}")
    if EMBEDDING not in gguf.tensors:
        raise gguf.bad(f"has no tensor {EMBEDDING!r}")
    heads = keys.whole("attention.head_count")
    fields: dict[str, Any] = {field: keys.whole(key) for key, field in SIZES.items()} | {
        "architectures": [family.architecture],
        "vocab_size": gguf.tensors[EMBEDDING].shape[0],
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": keys.head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(keys),
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied(gguf),
        "torch_dtype": _dtype(gguf),
        "eos_token_id": end_ids(gguf),
    }
    turning = keys.whole("rope.dimension_count", keys.head_dim)
    if turning != keys.head_dim:
        fields["partial_rotary_factor"] = turning / keys.head_dim
    fields |= family.fields(keys)
    if keys.whole("attention.value_length", keys.head_dim) != keys.head_dim:
        raise gguf.bad("values and keys of different sizes are not supported")
    return _reading(keys, fields)


def is_tied(gguf: Gguf) -> bool:
    """Whether the embedding is the output matrix as it is. If its numbers are whole, they are read for each anew."""
    return OUTPUT not in gguf.tensors and gguf.tensors[EMBEDDING].kind in DTYPES


def generation_of(gguf: Gguf) -> dict[str, Any]:
    """What generation_config.json would say."""
    said = {
        "temperature": gguf.maybe("general.sampling.temp", float), "top_p": gguf.maybe("general.sampling.top_p", float),
        "top_k": gguf.maybe("general.sampling.top_k", int), "min_p": gguf.maybe("general.sampling.min_p", float),
        "repetition_penalty": gguf.maybe("general.sampling.penalty_repeat", float),
    }  # fmt: skip
    return {name: value for name, value in said.items() if value is not None} | {"eos_token_id": end_ids(gguf)}


def _dtype(gguf: Gguf) -> str:
    """What most bytes of the weights are."""
    totals: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        dtype = DTYPES.get(tensor.kind, QUANTISED)
        totals[dtype] = totals.get(dtype, 0) + tensor.end - tensor.begin
    return max(totals, key=lambda name: totals[name])


def _reading(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a decoder that embeds, its name says so. Raises BadGguf for pooling that no decoder here does."""
    if not keys.gguf.take(f"{keys.prefix}.attention.causal", bool, True):
        raise keys.gguf.bad("attention in both directions is not supported")
    pooling = keys.whole("pooling_type", 0)
    if pooling not in (0, LAST):
        raise keys.gguf.bad(
            f"'{keys.prefix}.pooling_type' is {pooling}, and a decoder's prompts are pooled by their last token only"
        )
    if pooling == LAST:
        fields["architectures"] = [fields["architectures"][0].replace("ForCausalLM", "Model")]
    return fields


def _scaling(keys: Keys) -> dict[str, Any] | None:
    """`rope_scaling`. A factor for every frequency is what longrope has, whatever it was computed from."""
    gguf, kind, factor = keys.gguf, keys.text("rope.scaling.type", "none"), keys.number("rope.scaling.factor", 0.0)
    if keys.number("rope.scale_linear", 1.0) not in (0.0, 1.0):
        raise gguf.bad(f"'{keys.prefix}.rope.scale_linear' is of an older kind of file, which is not read")
    if FREQUENCIES in gguf.tensors:
        if kind != "none":
            raise gguf.bad(f"has {FREQUENCIES!r} and rope scaling {kind[:32]!r}")
        factors = gguf.floats(FREQUENCIES)
        return _factors(factors, factors, {"attention_factor": 1.0, "factor": 1.0})
    if kind == "longrope" or LONG in gguf.tensors:
        return _longrope(keys)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise gguf.bad(f"rope scaling {kind[:32]!r} is not one of none, linear, yarn, longrope")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(keys, factor)


def _longrope(keys: Keys) -> dict[str, Any]:
    gguf, original = keys.gguf, keys.whole("rope.scaling.original_context_length", 0)
    if LONG not in gguf.tensors or SHORT not in gguf.tensors:
        raise gguf.bad(f"rope scaling 'longrope' needs {LONG!r} and {SHORT!r}")
    more = {"factor": keys.whole("context_length") / original} if original else {}
    if keys.has("rope.scaling.attn_factor"):
        more["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return _factors(gguf.floats(SHORT), gguf.floats(LONG), more)


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise keys.gguf.bad(f"'{keys.prefix}.rope.scaling.attn_factor' with rope scaling 'yarn' is not supported")
    betas = {f"beta_{end}": keys.number(f"rope.scaling.yarn_beta_{end}", 0.0) for end in ("fast", "slow")}
    original = keys.whole("rope.scaling.original_context_length", 0) or None
    given = {name: value for name, value in betas.items() if value}
    if keys.has("rope.scaling.yarn_attn_factor"):
        given["attention_factor"] = keys.number("rope.scaling.yarn_attn_factor")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | given


def _factors(short: list[float], long: list[float], more: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **more}
