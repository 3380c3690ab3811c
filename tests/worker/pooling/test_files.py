"""Reading sentence-transformers' files; unknown contents are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagoda_proto.pooling.params import EMBED, TOKEN_EMBED
from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.pooling.files import embedder, longest, stages_of
from pagoda_worker.pooling.stages import Dense

ST = "sentence_transformers.models."


def write(root: Path, *modules: tuple[str, str, dict[str, Any]], **lengths: Any) -> Path:
    """The modules after the transformer: type, folder, config."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{ST}Transformer"}]
    for index, (kind, folder, config) in enumerate(modules, 1):
        listed.append({"idx": index, "name": str(index), "path": folder, "type": f"{ST}{kind}"})
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "config.json").write_text(json.dumps(config))
    (root / "modules.json").write_text(json.dumps(listed))
    (root / "sentence_bert_config.json").write_text(json.dumps(lengths))
    return root


def pooling(**modes: Any) -> tuple[str, str, dict[str, Any]]:
    return "Pooling", "1_Pooling", {"word_embedding_dimension": 4, **modes}


NORMALIZE = ("Normalize", "2_Normalize", {})


def dense(root: Path, inputs: int = 4) -> tuple[str, str, dict[str, Any]]:
    (root / "2_Dense").mkdir(parents=True)
    weight = torch.arange(2.0 * inputs).view(2, inputs)
    save_file({"linear.weight": weight, "linear.bias": torch.ones(2)}, root / "2_Dense/model.safetensors")
    config = {"in_features": inputs, "out_features": 2, "activation_function": "torch.nn.modules.activation.Tanh"}
    return "Dense", "2_Dense", config


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_way_to_pool_is_read(mode: dict[str, Any], way: str, tmp_path: Path) -> None:
    found = embedder(write(tmp_path, pooling(**mode)), 4, "cls", whole=True)
    assert (found.ways, found.width, found.normalizes, found.skips) == ((way,), 4, False, False)
    assert found.outputs == (EMBED, TOKEN_EMBED)


def test_several_ways_and_prompts_left_out(tmp_path: Path) -> None:
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "include_prompt": False}
    found = embedder(write(tmp_path, pooling(**modes), NORMALIZE), 4, "cls", whole=True)
    assert (found.ways, found.width, found.normalizes, found.skips) == (("cls", "mean"), 8, True, True)
    assert found.outputs == (EMBED,)


def test_a_dense_module_changes_the_width(tmp_path: Path) -> None:
    layer = dense(tmp_path)
    found = embedder(write(tmp_path, pooling(pooling_mode_mean_tokens=True), layer), 4, "cls", whole=True)
    assert found.width == 2
    (stage,) = found.stages
    assert isinstance(stage, Dense)
    np.testing.assert_allclose(stage(np.zeros((1, 4), np.float32)), np.tanh([[1.0, 1.0]]), rtol=1e-6)


def test_without_files_the_default_holds_and_vectors_have_length_one(tmp_path: Path) -> None:
    found = embedder(tmp_path, 4, "last", whole=False)
    assert (found.ways, found.normalizes, found.needs_all) == (("last",), True, False)
    assert longest(tmp_path) == 0


@pytest.mark.parametrize(("given", "found"), [(256, 256), (0, 0), (None, 0), (True, 0), ("9", 0)])
def test_how_long_a_text_may_be(given: Any, found: int, tmp_path: Path) -> None:
    assert longest(write(tmp_path, pooling(pooling_mode_mean_tokens=True), max_seq_length=given)) == found


@pytest.mark.parametrize(
    ("modules", "whole", "said"),
    [
        ([("WordWeights", "1_W", {})], True, "WordWeights"),
        ([pooling(pooling_mode_strange=True)], True, "pooling_mode_strange"),
        ([pooling(pooling_mode="strange")], True, "strange"),
        ([pooling(pooling_mode_mean_tokens=True)], False, "last token only"),
        ([pooling(), ("Dense", "2_Dense", {"activation_function": "torch.nn.Hardtanh"})], True, "Hardtanh"),
        ([pooling(), ("Dense", "2_Dense", {"module_input_name": "token_embeddings"})], True, "module_input_name"),
        ([pooling(), ("Dense", "2_Dense", {"module_output_name": "other"})], True, "module_output_name"),
        ([("Dense", "2_Dense", {}), pooling()], True, "Pooling must come once"),
        ([pooling(), pooling()], True, "Pooling must come once"),
        ([NORMALIZE], True, "Pooling must come once"),
        ([], True, "Pooling must come once"),
        ([pooling(), NORMALIZE, ("LayerNorm", "3_LayerNorm", {})], True, "after Normalize"),
        ([pooling(), NORMALIZE, ("Dense", "3_Dense", {})], True, "after Normalize"),
    ],
)
def test_what_is_not_known_is_refused_by_name(modules: list[Any], whole: bool, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig, match=said):
        embedder(write(tmp_path, *modules), 4, "cls", whole=whole)


@pytest.mark.parametrize("kind", ["StaticEmbedding", "CLIPModel", "Router", "MLMTransformer", "Custom"])
def test_what_reads_the_text_must_be_a_transformer(kind: str, tmp_path: Path) -> None:
    write(tmp_path, pooling(), NORMALIZE)
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[0]["type"] = f"elsewhere.{kind}"
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(UnsupportedConfig, match=f"first module of type '{kind}'"):
        embedder(tmp_path, 4, "cls", whole=True)


def test_what_follows_normalised_token_vectors_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, NORMALIZE, dense(tmp_path / "other"))
    with pytest.raises(UnsupportedConfig, match="after Normalize"):
        stages_of(path, 4)


def test_dropout_changes_nothing(tmp_path: Path) -> None:
    layers = [("Dropout", "1_Dropout", {}), pooling(), ("Dropout", "2_Dropout", {}), NORMALIZE]
    assert embedder(write(tmp_path, *layers), 4, "cls", whole=True).normalizes


def test_a_dense_module_of_another_size_is_refused(tmp_path: Path) -> None:
    layer = dense(tmp_path, inputs=6)
    with pytest.raises(CheckpointError, match="4 inputs"):
        embedder(write(tmp_path, pooling(pooling_mode_mean_tokens=True), layer), 4, "cls", whole=True)


@pytest.mark.parametrize(
    "content", ["", "{}", "[3]", '[{"type": "a", "path": "../x"}]', '[{"type": "a"}]', "[" * 100_000]
)
def test_damaged_modules_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError):
        embedder(tmp_path, 4, "cls", whole=True)


def test_a_dense_with_a_residual_is_refused(tmp_path: Path) -> None:
    kind, folder, config = dense(tmp_path)
    with pytest.raises(UnsupportedConfig, match="use_residual"):
        embedder(write(tmp_path, pooling(), (kind, folder, config | {"use_residual": True})), 4, "cls", whole=True)
