"""bench/adapters.py: the adapters it makes are served, and both sides are measured."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gguf_files import DEMO

from bench import adapters
from pagoda_proto.adapters.files import WEIGHTS


def test_both_sides_are_measured(tmp_path: Path) -> None:
    small = ["--rows", "4", "--adapters", "2", "--rank", "4", "--output-len", "4", "--rounds", "2"]
    command = [sys.executable, adapters.__file__, str(DEMO), *small, "--json", str(tmp_path / "found.json")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "ms with 2 of rank 4 on q_proj," in told
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["seconds"]) == len(found["ratios"]) == 2
    assert all(second > 0 for pair in found["seconds"] for second in pair)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([str(DEMO), "--targets", "q_proj,c_fc"], "has no c_fc"),
        (["/no/such", "--targets", "q_proj"], "/no/such is no directory"),
        ([str(DEMO), "--adapters", "5", "--rows", "4"], "5 adapters need as many rows, not 4"),
        ([str(DEMO), "--adapters", "0"], "argument --adapters"),
        ([str(DEMO), "--json", "/no/such/file"], "there is no directory /no/such"),
    ],
)
def test_what_cannot_be_measured_is_told(words: list[str], message: str) -> None:
    command = [sys.executable, adapters.__file__, *words]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_without_targets_those_count_that_the_model_has(tmp_path: Path) -> None:
    sizes = {"model.layers.0.self_attn.q_proj.weight": (8, 4), "model.layers.0.mlp.experts.0.up_proj.weight": (8, 4)}
    save_file({name: torch.zeros(size) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    assert adapters.targets_of(argparse.Namespace(model=str(tmp_path), targets="")) == ["q_proj"]


def test_every_layer_has_its_own_numbers(tmp_path: Path) -> None:
    adapters.make_adapter(DEMO, tmp_path / "a", rank=3, targets=["q_proj", "down_proj"], seed=1)
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    sizes = dict(adapters.matrices(DEMO, ["q_proj", "down_proj"]))
    assert len(tensors) == 2 * len(sizes)
    for name, (outputs, inputs) in sizes.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
        assert (a.shape, b.shape) == ((3, inputs), (outputs, 3))
    ofs = [tensor.flatten()[:8] for tensor in tensors.values()]
    assert not any(torch.equal(one, other) for i, one in enumerate(ofs) for other in ofs[:i])
