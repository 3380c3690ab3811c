"""config.json: both spellings are read alike, and nothing that changes the arithmetic is overlooked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagoda_worker.layers.rope import RopeShape, inverse_frequencies
from pagoda_worker.loading import native_spec
from pagoda_worker.models.config_reader import UnsupportedConfig
from pagoda_worker.models.spec import DecoderSpec, expected_tensors

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
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def read(kind: str = "Llama", **changes: Any) -> DecoderSpec:
    return native_spec(f"{kind}ForCausalLM", BASE | changes)


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
        ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "does not take beta_fast"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Llama", {"partial_rotary_factor": 0.5}, "not supported natively: partial_rotary_factor"),
        ("Llama", {"logit_scale": 2.0, "no_rope_layers": [1]}, "not supported natively: logit_scale, no_rope_layers"),
        ("Llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("Llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("Llama", {"hidden_size": None}, "'hidden_size' is missing"),
        ("Llama", {"hidden_size": "64"}, "'hidden_size' must be of type int"),
        ("Llama", {"num_attention_heads": 0}, "at least 1"),
        ("Llama", {"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
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


def test_fields_that_are_off_do_no_harm() -> None:
    assert read(sliding_window=None, use_thing=False, auto_map={"AutoModel": "x.Y"}, attention_dropout=0.1) == read()


def test_windows() -> None:
    assert read("Mistral", sliding_window=40).windows == (40,) * 4
    assert read("Mistral").windows == (None,) * 4
    sliding = {"sliding_window": 40, "max_window_layers": 3}
    assert read("Qwen2", **sliding, use_sliding_window=True).windows == (None, None, None, 40)
    assert read("Qwen2", **sliding, use_sliding_window=False).windows == (None,) * 4
    assert read("Gemma2", sliding_window=40).windows == (40, None, 40, None)
    gemma3 = read("Gemma3", sliding_window=40, sliding_window_pattern=3)
    assert gemma3.windows == (40, 40, None, 40)
    assert gemma3.rope_of_layer == (0, 0, 1, 0)
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


def test_llama3_blends_between_the_two_wavelengths() -> None:
    plain = inverse_frequencies(RopeShape(theta=1e4, head_dim=64))
    shape = RopeShape(theta=1e4, head_dim=64, kind="llama3", factor=8.0, original_max_position=512)
    ratio = inverse_frequencies(shape) / plain
    wavelength = 2 * torch.pi / plain
    assert torch.equal(ratio[wavelength < 128], torch.ones_like(ratio[wavelength < 128]))
    assert torch.allclose(ratio[wavelength > 512], torch.tensor(1 / 8))
    middle = ratio[(wavelength > 128) & (wavelength < 512)]
    assert ((middle > 1 / 8) & (middle < 1)).all()
