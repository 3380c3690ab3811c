"""From the metadata of a GGUF file to the config.json of the model from which it was converted.

The peculiarities of an architecture are a row of `gguf_families`. An unknown key of the architecture may change the
arithmetic, so it is refused, as a field of config.json would be.
"""

from __future__ import annotations

from typing import Any

from pagoda_proto.model_files.gguf import Gguf
from pagoda_proto.model_files.gguf_families import FAMILIES, family_of
from pagoda_proto.model_files.gguf_keys import Keys, rope_scaling
from pagoda_proto.model_files.gguf_tokenizer import TOKENS, end_ids

QUANTISED = "bfloat16"  # dtype of the computation with quantised weights
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
LAST = 3  # a value of `pooling_type`

# Keys that all architectures have, after "<architecture>.", with their names in config.json.
SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
KNOWN = {
    *SIZES, "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_attn_factor", "rope.scale_linear", "expert_count", "expert_used_count", "pooling_type",
    "attention.causal", "tensor_data_layout",
}  # fmt: skip


def config_of(gguf: Gguf) -> dict[str, Any]:
    """The contents of config.json. Raises BadGguf for missing and for unknown keys."""
    name = family_of(gguf)
    family, keys = FAMILIES[name], Keys(gguf, name)
    known = {f"{name}.{key}" for key in KNOWN | family.keys | {family.epsilon[0]}}
    unknown = sorted(key for key in gguf.keys - known if key.startswith(f"{name}."))
    if unknown:
        raise gguf.bad(f"not supported: {', '.join(unknown[:8])}")
    if EMBEDDING not in gguf.tensors:
        raise gguf.bad(f"has no tensor {EMBEDDING!r}")
    heads = keys.whole("attention.head_count")
    fields: dict[str, Any] = {field: keys.whole(key) for key, field in SIZES.items()} | {
        "architectures": [family.architecture],
        "vocab_size": _vocab_size(keys),
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": keys.head_dim,
        family.epsilon[1]: keys.number(family.epsilon[0]),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(keys),
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied(gguf),
        "torch_dtype": _dtype(gguf),
        "eos_token_id": end_ids(gguf),
    }
    turning = keys.whole("rope.dimension_count", keys.head_dim)
    if turning != keys.head_dim:
        fields["partial_rotary_factor"] = turning / keys.head_dim
    fields |= family.fields(keys)
    if "kv_lora_rank" not in fields and keys.whole("attention.value_length", keys.head_dim) != keys.head_dim:
        raise gguf.bad("values and keys of different sizes are not supported")
    return _reading(keys, fields)


def is_tied(gguf: Gguf) -> bool:
    """Whether the embedding also serves as the output matrix. If quantised, it is read separately for each."""
    return OUTPUT not in gguf.tensors and gguf.tensors[EMBEDDING].kind in DTYPES


def generation_of(gguf: Gguf) -> dict[str, Any]:
    """The contents of generation_config.json."""
    said = {
        "temperature": gguf.maybe("general.sampling.temp", float), "top_p": gguf.maybe("general.sampling.top_p", float),
        "top_k": gguf.maybe("general.sampling.top_k", int), "min_p": gguf.maybe("general.sampling.min_p", float),
        "repetition_penalty": gguf.maybe("general.sampling.penalty_repeat", float),
    }  # fmt: skip
    return {name: value for name, value in said.items() if value is not None} | {"eos_token_id": end_ids(gguf)}


def _vocab_size(keys: Keys) -> int:
    """The rows of the embedding: often more than the tokens, as padding. Raises BadGguf if they are fewer than the
    tokens, or other than the file says."""
    gguf = keys.gguf
    rows = gguf.tensors[EMBEDDING].shape[0]
    said, tokens = keys.whole("vocab_size", rows), len(gguf.items(TOKENS, str) or ())
    if said != rows:
        raise gguf.bad(f"'{keys.prefix}.vocab_size' is {said}, but {EMBEDDING!r} has {rows} rows")
    if tokens > rows:
        raise gguf.bad(f"{TOKENS!r} has {tokens} tokens, but {EMBEDDING!r} has only {rows} rows")
    return rows


def _dtype(gguf: Gguf) -> str:
    """The dtype of most bytes of the weights."""
    totals: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        dtype = DTYPES.get(tensor.kind, QUANTISED)
        totals[dtype] = totals.get(dtype, 0) + tensor.end - tensor.begin
    return max(totals, key=lambda name: totals[name])


def _reading(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """Rename the architecture of a decoder that embeds. Raises BadGguf for pooling that no decoder here supports."""
    if not keys.gguf.take(f"{keys.prefix}.attention.causal", bool, True):
        raise keys.gguf.bad("bidirectional attention is not supported")
    pooling = keys.whole("pooling_type", 0)
    if pooling not in (0, LAST):
        raise keys.gguf.bad(
            f"'{keys.prefix}.pooling_type' is {pooling}, but decoders support pooling by the last token only"
        )
    if pooling == LAST:
        fields["architectures"] = [fields["architectures"][0].replace("ForCausalLM", "Model")]
    return fields
