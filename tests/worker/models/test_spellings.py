"""Checkpoints of one family that name or store tensors differently give the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.models.checkpoints import prompts
from tests.worker.models.conftest import Loaded, Saved
from tests.worker.models.harness import logits_of

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.quantized import FORMATS, dequantize, quantize
from pagoda_worker.loading.model import LoadedModel, load_model

IDS = prompts()[-1]


def respelled(source: Path, target: Path, rename: Callable[[str], str]) -> LoadedModel:
    target.mkdir()
    tensors = {rename(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return load_model(WorkerConfig(model=str(target), dtype="float32", kernels="torch", fallback=False))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("gpt2", "transformer.", ""),
        ("opt", "model.decoder.", "decoder."),
        ("gpt_neox", "lm_head.", "embed_out."),
        ("gpt_neox", "embed_out.", "lm_head."),
    ],
)
def test_other_names(name: str, old: str, new: str, saved: Saved, loaded: Loaded, tmp_path: Path) -> None:
    other = respelled(saved(name)[1], tmp_path / "other", lambda tensor: tensor.replace(old, new))
    assert torch.equal(logits_of(other, IDS, [40]), logits_of(loaded(name), IDS, [40]))


def test_names_of_nobody_are_told_in_those_of_the_family(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensors: transformer\.h\.0\.attn"):
        respelled(saved("gpt2")[1], tmp_path / "other", lambda tensor: tensor.replace("attn", "at"))


def test_transposed_matrices_are_rounded_as_the_others_are(saved: Saved, tmp_path: Path) -> None:
    """Groups run along inputs, which are the rows of GPT-2's stored matrices."""
    source, target = saved("gpt2")[1], tmp_path / "rounded"
    target.mkdir()
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    form = FORMATS["int8"]
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(matrices):
            tensors[name] = dequantize(quantize(tensors[name].t().contiguous(), form)).t().contiguous()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())

    def load(path: Path, **options: str) -> LoadedModel:
        config = WorkerConfig(model=str(path), dtype="float32", kernels="torch", fallback=False, **options)
        return load_model(config)

    rounded, expected = (logits_of(one, IDS, [40]) for one in (load(source, quantization="int8"), load(target)))
    exact = logits_of(load(source), IDS, [40])
    assert (rounded - expected).abs().mean() < 0.1 * (exact - expected).abs().mean() + 0.02
