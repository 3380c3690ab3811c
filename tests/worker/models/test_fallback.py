"""Models without a native implementation: transformers' code on our cache, or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.models.checkpoints import FALLBACK, make_model, prompts, save
from tests.worker.models.conftest import Loaded, Saved
from tests.worker.models.harness import Harness, logits_of
from tests.worker.models.test_oracle import choices_of

from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading import load_model
from pagoda_worker.models.config_reader import UnsupportedConfig

DENSE = ["gpt2", "gpt_neox", "stablelm", "olmo2", "cohere2"]


@pytest.mark.parametrize("name", FALLBACK)
def test_greedy_tokens_are_those_of_transformers(name: str, saved: Saved, loaded: Loaded) -> None:
    model, together = loaded(name), prompts()
    assert not model.native
    answers = Harness(model, num_blocks=128).greedy(together, 8, chunk=40)
    for prompt, answer in zip(together, answers, strict=True):
        assert choices_of(saved(name)[0], prompt, answer) == answer


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in DENSE), *((name, "bfloat16") for name in FALLBACK)]
)
def test_bits_do_not_depend_on_chunks(name: str, dtype: str, loaded: Loaded) -> None:
    model, ids = loaded(name, dtype), prompts()[-1]
    whole = logits_of(model, ids, [len(ids)])
    for chunks in ([16], [80, 1]):
        assert torch.equal(logits_of(model, ids, chunks), whole)


def test_experts_in_float32_claim_nobodys_numerics(saved: Saved, loaded: Loaded) -> None:
    """Their matrix products go through a library that is not batch invariant in float32: said, not hidden."""
    config = WorkerConfig(model=str(saved("qwen3_moe")[1]), dtype="float32", kernels="torch")
    assert load_model(config).numerics_id != loaded("qwen3_moe").numerics_id
    config = WorkerConfig(model=str(saved("olmo2")[1]), dtype="float32", kernels="torch")
    assert load_model(config).numerics_id == loaded("olmo2").numerics_id


def test_progress_ends_at_the_whole(saved: Saved) -> None:
    seen: list[tuple[int, int]] = []
    load_model(WorkerConfig(model=str(saved("olmo2")[1]), kernels="torch"), lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] > 0


def edited(saved: Saved, name: str, target: Path, **changes: Any) -> WorkerConfig:
    """A checkpoint with another config.json."""
    source = saved(name)[1]
    fields = json.loads((source / "config.json").read_text()) | changes
    target.mkdir()
    (target / "config.json").write_text(json.dumps(fields))
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    return WorkerConfig(model=str(target), dtype="float32", kernels="torch")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmo2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("olmo2", {"model_type": "unheard", "auto_map": {"AutoConfig": "x.Y"}}, "does not know this model"),
        ("olmo2", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("olmo2", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("olmo2", {"num_hidden_layers": 4}, "the checkpoint lacks"),
        ("cohere2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ],
)
def test_refusals(saved: Saved, tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=message):
        load_model(edited(saved, name, tmp_path / "edited", **changes))


@pytest.mark.parametrize("model_type", ["mamba", "bloom"])
def test_layers_that_are_not_plain_attention(model_type: str, tmp_path: Path) -> None:
    path = save(make_model(model_type, {}), tmp_path / model_type)
    with pytest.raises(UnsupportedConfig, match="0 of 3 layers use plain attention"):
        load_model(WorkerConfig(model=str(path), dtype="float32", kernels="torch"))


def test_an_unsupported_field_of_a_native_family_runs_through_transformers(saved: Saved, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    config = edited(saved, "qwen3", tmp_path / "yarn", rope_parameters=yarn)
    model = load_model(config)
    assert not model.native
    assert len(Harness(model).greedy([[5, 6, 7]], 4)[0]) == 4
