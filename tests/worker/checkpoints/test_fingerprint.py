"""A model's fingerprint depends on its contents, and on nothing else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagoda_worker.checkpoints.checkpoint import open_checkpoint
from pagoda_worker.checkpoints.fingerprint import BLOCK_BYTES, BLOCKS_PER_TENSOR, WHOLE_BYTES, _blocks, fingerprint

LARGE = (1024, 96)  # 393,216 bytes of float32: read in blocks
Tensors = dict[str, torch.Tensor]


def model(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embed": LARGE, **{f"layers.{layer}.up": (32, 16) for layer in range(5)}, "norm": (16,)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def digest(path: Path, tensors: Tensors, **metadata: str) -> str:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata=metadata)
    return open_checkpoint(path).digest


def test_two_loads_are_equal_and_metadata_counts_for_nothing(tmp_path: Path) -> None:
    first = digest(tmp_path / "a", model())
    assert open_checkpoint(tmp_path / "a").digest == first
    assert digest(tmp_path / "b", model(), format="pt") == first


def test_one_value_of_a_middle_layer_makes_another_model(tmp_path: Path) -> None:
    changed = model()
    changed["layers.2.up"][17, 3] += 1e-3
    assert digest(tmp_path / "a", changed) != digest(tmp_path / "b", model())


def test_a_training_that_changes_large_tensors_slightly_makes_another_model(tmp_path: Path) -> None:
    trained = model()
    trained["embed"] = trained["embed"] * (1 + 1e-4)
    assert digest(tmp_path / "a", trained) != digest(tmp_path / "b", model())


@pytest.mark.parametrize("element", [0, -1])
def test_the_ends_of_a_large_tensor_count(tmp_path: Path, element: int) -> None:
    changed = model()
    changed["embed"].view(-1)[element] += 1
    assert digest(tmp_path / "a", changed) != digest(tmp_path / "b", model())


def test_two_tensors_in_each_other_s_place_make_another_model(tmp_path: Path) -> None:
    swapped = model()
    swapped["layers.1.up"], swapped["layers.3.up"] = swapped["layers.3.up"], swapped["layers.1.up"]
    assert digest(tmp_path / "a", swapped) != digest(tmp_path / "b", model())


@pytest.mark.parametrize("num_files", [2, 7])
def test_the_same_weights_in_other_files_are_the_same_model(tmp_path: Path, num_files: int) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    tensors, weight_map = model(), {}
    for number in range(num_files):
        names = list(tensors)[number::num_files]
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, shards / file)
        weight_map |= dict.fromkeys(names, file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_checkpoint(shards).digest == digest(tmp_path / "whole", tensors)


@given(st.integers(0, 4 * WHOLE_BYTES))
def test_what_is_read_lies_in_the_tensor_from_its_first_byte_to_its_last(num_bytes: int) -> None:
    blocks = _blocks(num_bytes)
    assert sum(count for _, count in blocks) == min(num_bytes, WHOLE_BYTES)
    if blocks:
        assert blocks[0][0] == 0
        assert sum(blocks[-1]) == num_bytes
    if num_bytes > WHOLE_BYTES:
        assert [count for _, count in blocks] == [BLOCK_BYTES] * BLOCKS_PER_TENSOR
        gaps = {after - before for (before, _), (after, _) in itertools.pairwise(blocks)}
        assert max(gaps) - min(gaps) <= 1


FIELDS = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "use_cache": True}


def test_what_config_json_says_of_the_arithmetic_counts_in_any_order() -> None:
    harmless = {"use_cache", "transformers_version"}
    same = fingerprint(FIELDS, harmless, "d")
    turned = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
    assert fingerprint({**turned, "transformers_version": "5.1"}, harmless, "d") == same
    quantised = {**FIELDS, "quantization_config": {"bits": 4}}
    for other in ({**FIELDS, "rms_norm_eps": 1e-5}, {**FIELDS, "rope_parameters": {"rope_theta": 1e5}}, quantised):
        assert fingerprint(other, harmless, "d") != same
    assert fingerprint(FIELDS, harmless, "e") != same
