"""A GGUF file and a config.json describe a model alike: the same spec results from both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gguf_files import GgufFile, Stored, demo_pairs, write_demo
from tests.worker.models.published import PUBLISHED

from pagoda_proto.model_files.gguf import BadGguf, read_gguf
from pagoda_proto.model_files.gguf_config import FAMILIES, config_of, generation_of
from pagoda_worker.checkpoints.config_reader import HARMLESS
from pagoda_worker.loading.model import native_spec

ARCHITECTURES = {family.architecture: name for name, family in FAMILIES.items()} | {"MistralForCausalLM": "llama"}


def written(config: dict[str, Any], path: Path) -> Path:
    """A GGUF file with a published config.json as pairs, and with tensors that are mere placeholders."""
    arch = ARCHITECTURES[config["architectures"][0]]
    scaling = config.get("rope_scaling") or {}
    said = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
    }  # fmt: skip
    if "head_dim" in config:
        said |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if config.get("sliding_window") and arch in ("llama", "gemma2", "gemma3"):
        said["attention.sliding_window"] = config["sliding_window"]
    rows = config["vocab_size"]
    tensors = {"token_embd.weight": Stored(bytes(2 * rows), (rows, 1), "F16")}
    if not config.get("tie_word_embeddings", arch.startswith("gemma")):
        tensors["output.weight"] = tensors["token_embd.weight"]
    assert scaling.get("rope_type") in (None, "llama3")
    vocabulary = {"tokenizer.ggml.tokens": ["a", "b"], "general.architecture": arch}
    return GgufFile(vocabulary | {f"{arch}.{name}": value for name, value in said.items()}, tensors).write(path)


@pytest.mark.parametrize("name", [name for name, config in PUBLISHED.items() if not config.get("rope_scaling")])
def test_published_models_have_the_spec_of_their_config(name: str, tmp_path: Path) -> None:
    """Except Llama 3's rope scaling, which a GGUF file has as a tensor."""
    config = PUBLISHED[name]
    ours = config_of(read_gguf(written(config, tmp_path / "m.gguf")))
    assert native_spec(ours["architectures"][0], ours) == native_spec(config["architectures"][0], config)


def test_the_bundled_model_says_what_its_config_says(tmp_path: Path) -> None:
    ours = config_of(read_gguf(write_demo(tmp_path / "m.gguf", "BF16")))
    assert {name: value for name, value in ours.items() if name not in HARMLESS} == {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
        "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-05, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    }  # fmt: skip
    assert ours["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q4_0", "bfloat16")])
def test_dtypes(kind: str, dtype: str, tmp_path: Path) -> None:
    """Quantised weights determine no dtype. A quantised embedding is read again for the output matrix."""
    ours = config_of(read_gguf(write_demo(tmp_path / "m.gguf", kind)))
    assert ours["torch_dtype"] == dtype
    assert ours["tie_word_embeddings"] == (kind != "Q4_0")


def opened(changes: dict[str, Any], path: Path, tensors: dict[str, Stored] | None = None) -> dict[str, Any]:
    pairs = {key: value for key, value in (demo_pairs() | changes).items() if value is not None}
    embedding = {"token_embd.weight": Stored(bytes(1024), (512, 1), "F16")}
    return config_of(read_gguf(GgufFile(pairs, embedding | (tensors or {})).write(path / "m.gguf")))


def test_gpt_oss_without_scaling_has_none(tmp_path: Path) -> None:
    """In a config.json that says nothing about scaling it would be yarn."""
    said = {key.removeprefix("llama."): value for key, value in demo_pairs().items() if key.startswith("llama.")} | {
        "attention.sliding_window": 128, "attention.key_length": 64, "expert_count": 4, "expert_used_count": 2,
        "expert_feed_forward_length": 32,
    }  # fmt: skip
    pairs = {"general.architecture": "gpt-oss"} | {f"gpt-oss.{key}": value for key, value in said.items()}
    ours = opened(pairs, tmp_path)
    assert {layer.rope.kind for layer in native_spec("GptOssForCausalLM", ours).layers} == {"default"}


FACTORS = Stored(b"\0\0\x80\x3f" * 2, (2,))
SCALED: list[tuple[dict[str, Any], dict[str, Stored], dict[str, Any] | None]] = [
    ({"llama.rope.scaling.type": "none"}, {}, None),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {},
     {"rope_type": "linear", "factor": 4.0}),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
      "llama.rope.scaling.original_context_length": 512}, {},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
    ({}, {"rope_freqs.weight": FACTORS},
     {"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1], "attention_factor": 1, "factor": 1}),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0, "llama.rope.scaling.yarn_attn_factor": 1.5,
      "llama.rope.scaling.original_context_length": 512}, {},
     {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.5}),
    ({"llama.rope.scaling.original_context_length": 512, "llama.rope.scaling.attn_factor": 1.25},
     {"rope_factors_long.weight": FACTORS, "rope_factors_short.weight": FACTORS},
     {"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1], "attention_factor": 1.25, "factor": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "tensors", "scaling"), SCALED)
def test_scalings_of_rope(
    changes: dict[str, Any], tensors: dict[str, Stored], scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    assert opened(changes, tmp_path, tensors)["rope_scaling"] == scaling


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "clip"}, "architecture 'clip' is not one of llama, qwen2"),
    ({"general.architecture": None}, "'general.architecture' is missing"),
    ({"llama.block_count": None}, "'llama.block_count' is missing"),
    ({"llama.logit_scale": 2.0}, "not supported: llama.logit_scale"),
    ({"llama.attention.value_length": 32}, "values and keys of different sizes"),
    ({"llama.attention.head_count_kv": [2, 4]}, "'llama.attention.head_count_kv' differs by layer"),
    ({"llama.attention.causal": False}, "bidirectional attention"),
    ({"llama.pooling_type": 1}, "'llama.pooling_type' is 1"),
    ({"llama.rope.scaling.type": "other"}, "'other' is not one of none, linear, yarn, longrope"),
    ({"llama.rope.scaling.type": "longrope"}, "'longrope' needs 'rope_factors_long.weight'"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, "attn_factor' with rope scaling"),
    ({"llama.rope.scale_linear": 2.0}, "older format"),
    ({"llama.vocab_size": 511}, "'llama.vocab_size' is 511, but 'token_embd.weight' has 512 rows"),
    ({"llama.vocab_size": 513}, "'llama.vocab_size' is 513, but 'token_embd.weight' has 512 rows"),
    ({"tokenizer.ggml.eos_token_id": 512}, "'tokenizer.ggml.eos_token_id' is 512"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadGguf, match=message):
        opened(changes, tmp_path)


@pytest.mark.parametrize("said", [512, None])
def test_more_tokens_than_rows_are_refused_and_fewer_are_not(said: int | None, tmp_path: Path) -> None:
    """Embeddings are often padded."""

    def with_tokens(count: int) -> dict[str, Any]:
        tokens = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(count)], "tokenizer.ggml.token_type": [1] * count}
        return tokens | {"tokenizer.ggml.eos_token_id": 2, "llama.vocab_size": said}

    assert opened(with_tokens(500), tmp_path)["vocab_size"] == 512
    with pytest.raises(BadGguf, match=r"'tokenizer\.ggml\.tokens' has 513 tokens, but .* has only 512 rows"):
        opened(with_tokens(513), tmp_path)


def test_a_granite_that_does_not_turn_is_refused(tmp_path: Path) -> None:
    said = {name.replace("llama.", "granite."): value for name, value in demo_pairs().items()}
    said |= {"general.architecture": "granite", "granite.rope.scaling.finetuned": False}
    tensors = {"token_embd.weight": Stored(bytes(1024), (512, 1), "F16")}
    with pytest.raises(BadGguf, match="turns RoPE off"):
        config_of(read_gguf(GgufFile(said, tensors).write(tmp_path / "m.gguf")))


def test_layers_that_slide_turn_by_no_base_of_their_own(tmp_path: Path) -> None:
    """This holds for Olmo 3; Gemma 3's sliding layers have their own base."""
    said = {name.replace("llama.", "olmo2."): value for name, value in demo_pairs().items()}
    windows = {"attention.sliding_window": 64, "attention.sliding_window_pattern": [True] * 5}
    said |= {"general.architecture": "olmo2"} | {f"olmo2.{name}": value for name, value in windows.items()}
    tensors = {"token_embd.weight": Stored(bytes(1024), (512, 1), "F16")}

    def opened_with(base: float) -> dict[str, Any]:
        return config_of(
            read_gguf(GgufFile(said | {"olmo2.rope.freq_base_swa": base}, tensors).write(tmp_path / "m.gguf"))
        )

    assert opened_with(10_000.0)["architectures"] == ["Olmo3ForCausalLM"]
    with pytest.raises(BadGguf, match=r"'olmo2\.rope\.freq_base_swa' other than"):
        opened_with(20_000.0)


def test_a_decoder_that_embeds_says_so(tmp_path: Path) -> None:
    assert opened({"llama.pooling_type": 3}, tmp_path)["architectures"] == ["LlamaModel"]


def test_a_number_for_each_layer_may_be_one_number(tmp_path: Path) -> None:
    assert opened({"llama.attention.head_count_kv": [2] * 5}, tmp_path)["num_key_value_heads"] == 2


def test_what_the_author_recommends(tmp_path: Path) -> None:
    pairs = demo_pairs() | {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    found = generation_of(read_gguf(GgufFile(pairs).write(tmp_path / "m.gguf")))
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [511, 509]}
