"""The most used small models run natively, with the numbers that their publishers give them."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from tests.worker.fakes_spec import windows_of
from tests.worker.models.published import MILLIONS, OTHERS, PUBLISHED

from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import DecoderSpec, expected_tensors
from pagoda_worker.loading.model import native_spec


def read(name: str, **changes: Any) -> DecoderSpec:
    fields = PUBLISHED[name] | changes
    return native_spec(fields["architectures"][0], fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_native_and_as_large_as_published(name: str) -> None:
    spec, fields = read(name), PUBLISHED[name]
    parameters = sum(prod(shape) for shape in expected_tensors(spec).values())
    assert round(parameters / 1e6) == MILLIONS[name]
    assert spec.num_layers == fields["num_hidden_layers"]
    heads = {(layer.attention.num_heads, layer.attention.num_kv_heads) for layer in spec.layers}
    assert heads == {(fields["num_attention_heads"], fields["num_key_value_heads"])}
    assert spec.norm_eps == fields["rms_norm_eps"]
    assert spec.qkv_bias is name.startswith("Qwen2")
    assert spec.head_norms is (name.startswith("Qwen3") or "gemma-3" in name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_that_could_mean_something_is_not_overlooked(name: str) -> None:
    for changes in ({"logit_scale": 0.5}, {"rope_interleaved": True}, {"unheard_of": {"on": True}}):
        with pytest.raises(UnsupportedConfig, match=next(iter(changes))):
            read(name, **changes)


def test_what_families_turn_and_cut_by() -> None:
    llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192, "kind": "llama3"}
    assert read("Llama-3.2-1B").ropes == (RopeShape(theta=5e5, head_dim=64, factor=32.0, **llama),)  # type: ignore[arg-type]
    assert read("SmolLM2-135M-Instruct").ropes == (RopeShape(theta=1e5, head_dim=64),)
    assert read("SmolLM2-1.7B-Instruct").ropes == (RopeShape(theta=130_000.0, head_dim=64),)
    assert windows_of(read("Mistral-7B-v0.1")) == (4096,) * 32
    assert windows_of(read("Mistral-7B-Instruct-v0.3")) == (None,) * 32
    assert windows_of(read("Qwen2.5-0.5B-Instruct")) == (None,) * 24
    assert windows_of(read("gemma-2-2b")) == (4096, None) * 13
    assert windows_of(read("gemma-3-1b-it")) == tuple(None if (i + 1) % 6 == 0 else 512 for i in range(26))
    assert read("gemma-3-1b-it").ropes == (RopeShape(theta=1e4, head_dim=256), RopeShape(theta=1e6, head_dim=256))


@pytest.mark.parametrize("name", OTHERS)
def test_families_beside_llama_are_native_and_as_large_as_published(name: str) -> None:
    fields, millions = OTHERS[name]
    spec = native_spec(fields["architectures"][0], fields)
    assert round(sum(prod(shape) for shape in expected_tensors(spec).values()) / 1e6) == millions
    with pytest.raises(UnsupportedConfig, match="unheard_of"):
        native_spec(fields["architectures"][0], fields | {"unheard_of": 1})


def test_command_r_reaches_as_far_as_it_was_trained() -> None:
    assert native_spec("CohereForCausalLM", OTHERS["c4ai-command-r-v01"][0]).max_positions == 131072
