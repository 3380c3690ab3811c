"""A checkpoint in block-wise FP8 gives the model of its dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.adapters.files import spelt
from tests.worker.models.checkpoints import NATIVE, make_model, prompts, save
from tests.worker.models.harness import logits_of

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.formats import read_layout
from pagoda_worker.checkpoints.formats.fp8 import Float8Packing
from pagoda_worker.checkpoints.formats.layout import Stored
from pagoda_worker.checkpoints.spec import linear_layers
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model

ROWS, COLUMNS = 32, 48  # of a block; few matrices are multiples of them
METHOD: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [ROWS, COLUMNS],
}  # fmt: skip


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [N, K] -> FP8 values, scales, and the dequantised weight."""
    floats, numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // ROWS), -(-weight.shape[1] // COLUMNS))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS)
            scales[i, j] = weight[block].abs().max() / 448.0
            floats[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[block] = floats[block].float() * scales[i, j]
    return floats, scales, numbers


def written(name: str, path: Path, plain: str = "") -> tuple[Path, Path]:
    """A checkpoint in FP8 blocks, except for matrices called `plain`, and one with the dequantised weights."""
    blocks, numbers = path / "blocks", path / "numbers"
    model_type, changes = NATIVE[name]
    save(make_model(model_type, changes), numbers)
    tensors, spec = load_file(numbers / "model.safetensors"), spelt(numbers)
    packed = dict(tensors)
    for linear in linear_layers(spec):
        if linear != spec.names.head and not (plain and plain in linear):
            floats, scales, wide = rounded(tensors[f"{linear}.weight"])
            packed |= {f"{linear}.weight": floats, f"{linear}.weight_scale_inv": scales}
            tensors[f"{linear}.weight"] = wide
    save_file(tensors, numbers / "model.safetensors")
    blocks.mkdir()
    save_file(packed, blocks / "model.safetensors")
    fields = json.loads((numbers / "config.json").read_text())
    method = METHOD | ({"modules_to_not_convert": [plain, "lm_head"]} if plain else {})
    (blocks / "config.json").write_text(json.dumps(fields | {"quantization_config": method}))
    return blocks, numbers


def load(path: Path, **options: Any) -> LoadedModel:
    config = {"model": str(path), "dtype": "float32", "kernels": "reference", "fallback": False, **options}
    return load_model(WorkerConfig(**config))


def test_a_block_wider_than_its_matrix_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a file of a few kilobytes that declares such a block would take gigabytes."""
    peak = 0
    repeat = torch.Tensor.repeat_interleave

    def repeated(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal peak
        peak = max(peak, (made := repeat(tensor, *arguments)).numel())
        return made

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", repeated)
    weight = torch.randn(64, 16).to(torch.float8_e4m3fn)
    scales = torch.rand(64, 1)
    tensors = {"x.weight": weight, "x.weight_scale_inv": scales}
    stored = Stored("x", (64, 16), tensors, tensors.__getitem__)
    assert torch.equal(Float8Packing(1, 1 << 16).read(stored), weight.float() * scales)
    assert peak == weight.numel()


@pytest.mark.parametrize(("name", "plain"), [("qwen3", "k_proj"), ("deepseek_v3", "")])
def test_it_is_the_model_of_its_numbers(
    name: str, plain: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, numbers = written(name, tmp_path, plain)
    with caplog.at_level("INFO"):
        loaded = load(blocks)
    assert "no kernels for float8, so they are widened to torch.float32" in caplog.text
    ids = prompts()[-1]
    assert torch.equal(logits_of(loaded, ids, [50]), logits_of(load(numbers), ids, [50]))
    with pytest.raises(UnsupportedConfig, match=r"quantised already \(fp8: float8 group 48\)"):
        load(blocks, quantization="int8")


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    blocks, _ = written("qwen3", tmp_path)
    fields = json.loads((blocks / "config.json").read_text())
    fields["quantization_config"] = METHOD | {"weight_block_size": [16, 48]}
    (blocks / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"wrong shapes: .*weight_scale_inv has shape"):
        load(blocks)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"fmt": "e5m2"}, UnsupportedConfig, "fmt='e5m2'"),
        ({"activation_scheme": "static"}, UnsupportedConfig, "activation_scheme='static'"),
        ({"weight_block_size": None}, UnsupportedConfig, "'weight_block_size' is missing"),
        ({"weight_block_size": [128]}, UnsupportedConfig, "must be two sizes"),
        ({"weight_block_size": [128, 0]}, CheckpointError, "'weight_block_size' must be from 1"),
        ({"scale_fmt": "int"}, UnsupportedConfig, "scale_fmt='int'"),
        ({"modules_to_not_convert": [1]}, UnsupportedConfig, "must be a list of names"),
        ({"unheard_of": 1}, UnsupportedConfig, "unheard_of"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_layout({"quantization_config": METHOD | changes})
