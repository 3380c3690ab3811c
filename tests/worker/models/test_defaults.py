"""A file with missing fields is read as transformers completes it, and otherwise refused.

The oracle is transformers' own configuration class: what it makes of the same fields is read, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import transformers
from tests.worker.models.checkpoints import NATIVE, SLIDING, config_of

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.spec import DecoderSpec
from pagoda_worker.loading.model import native_spec
from pagoda_worker.models import ARCHITECTURES

WITH_IMAGES = "Llama4ForConditionalGeneration"
TEXT_ONLY = [name for name in ARCHITECTURES if name != WITH_IMAGES]
# Their own defaults give no model: heads that do not divide evenly, experts that are never chosen, layers of mamba.
NO_MODEL = {"Glm4MoeForCausalLM", "DeepseekV2ForCausalLM", "GraniteMoeHybridForCausalLM"}
KINDS = {"GraniteMoeHybridForCausalLM": {"layer_types"}}  # what else says which model it is
SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "n_group", "topk_group", "n_embd",
    "n_head", "n_layer", "n_positions", "ffn_dim", "word_embed_proj_dim",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
}  # fmt: skip


def files_of(architecture: str) -> Iterator[dict[str, Any]]:
    """Complete configurations of the architecture."""
    class_of = getattr(transformers, architecture).config_class
    if architecture not in NO_MODEL:
        yield class_of().to_dict()
    for model_type, changes in (NATIVE | SLIDING).values():
        config = config_of(model_type, changes)
        if type(config) is class_of:
            yield config.to_dict()


def read(architecture: str, fields: dict[str, Any]) -> DecoderSpec:
    spec = native_spec(architecture, fields)
    return replace(spec, unused_layers=0)  # counts tensors that nothing reads


def outcome(architecture: str, fields: dict[str, Any]) -> DecoderSpec | str:
    """The spec, or why the configuration is refused."""
    try:
        return read(architecture, fields)
    except (CheckpointError, UnsupportedConfig) as error:
        return str(error)


def assert_completed(architecture: str, fields: dict[str, Any]) -> None:
    """It is read as transformers' class completes it; or refused for a missing field, and transformers runs it."""
    ours = outcome(architecture, fields)
    if isinstance(ours, str) and ours.endswith(("is missing", "is not set")):
        return
    theirs = getattr(transformers, architecture).config_class(**deepcopy(fields))  # the class modifies its argument
    assert ours == outcome(architecture, theirs.to_dict())


@pytest.mark.parametrize("architecture", TEXT_ONLY)
def test_each_field_may_be_absent(architecture: str) -> None:
    for fields in files_of(architecture):
        for name in fields:
            assert_completed(architecture, {key: value for key, value in fields.items() if key != name})


@pytest.mark.parametrize("architecture", TEXT_ONLY)
def test_all_but_the_sizes_may_be_absent(architecture: str) -> None:
    for fields in files_of(architecture):
        needed = SIZES | KINDS.get(architecture, set())
        sizes = {name: value for name, value in fields.items() if name in needed}
        assert_completed(architecture, sizes)
        read(architecture, sizes)


def test_null_is_not_absent() -> None:
    fields = config_of(*NATIVE["gemma2"]).to_dict()
    uncapped = fields | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = read("Gemma2ForCausalLM", uncapped)
    assert spec.final_softcap is None
    assert {layer.attention.softcap for layer in spec.layers} == {None}
    assert_completed("Gemma2ForCausalLM", uncapped)
    mistral = config_of(*NATIVE["mistral"]).to_dict() | {"sliding_window": None}
    assert_completed("MistralForCausalLM", mistral)
    assert {layer.attention.window for layer in read("MistralForCausalLM", mistral).layers} == {None}


@pytest.mark.parametrize("said", [{}, {"rope_theta": 10_000.0}, {"rope_scaling": None}, {"rope_parameters": None}])
def test_gpt_oss_turns_by_yarn_unless_its_file_says_otherwise(said: dict[str, Any]) -> None:
    fields = config_of(*NATIVE["gpt_oss"]).to_dict()
    del fields["rope_parameters"]
    assert_completed("GptOssForCausalLM", fields | said)
    assert {rope.kind for rope in read("GptOssForCausalLM", fields | said).ropes} == {"yarn"}


def test_a_text_model_below_another_is_completed_as_one_alone() -> None:
    fields = next(files_of("Llama4ForCausalLM"))
    sizes = {name: value for name, value in fields.items() if name in SIZES}
    alone, below = read("Llama4ForCausalLM", sizes), read(WITH_IMAGES, {"text_config": sizes})
    assert replace(below, names=alone.names, unused=()) == alone
