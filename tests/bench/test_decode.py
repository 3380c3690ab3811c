"""bench/decode.py: the bytes that a step is said to read are those that the loaded model holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import decode, make_model
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.roofline import ModelShape
from pagoda_worker.loading.model import spec_of

SMALL = ModelShape(name="small", hidden=64, middle=128, heads=4, kv_heads=2, head_dim=16, vocab=600)
SIZES: dict[str, Any] = {
    "vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
QKV, OUT, MLP = (4 + 2 * 2) * 16 * 64, 64 * 64, 3 * 128 * 64


def test_a_dense_step_reads_every_matrix_once() -> None:
    spec = spec_of({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | SIZES)
    read = decode.read_by(spec, "bf16", context=10)
    assert read == (3 * 2 * (QKV + OUT + MLP), 0.0, 2 * 600 * 64, 3 * 2 * 2 * 10 * 2 * 16)
    in_8 = decode.read_by(spec, "int8", context=0)
    assert in_8.logits == 600 * 64 + 4 * 600
    assert in_8.dense == 3 * (QKV + OUT + MLP + 4 * (128 + 64 + 256 + 64))
    in_4 = decode.read_by(spec, "int4", context=0)
    assert (in_4.logits, in_4.dense) == (in_8.logits, 3 * (0.5 + 2 / 64) * (QKV + OUT + MLP))


def test_of_experts_a_step_reads_those_that_are_chosen() -> None:
    fields = {**SIZES, **make_model.MODELS["olmoe"].more}
    spec = spec_of({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"} | fields)
    read = decode.read_by(spec, "bf16", context=0)
    assert (read.dense, read.experts) == (3 * 2 * (QKV + OUT + 64 * 64), 3 * 2 * 8 * MLP)


@pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; there is nothing to measure")
def test_a_small_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model.MODELS["granite-moe"]
    monkeypatch.setitem(make_model.MODELS, "small", model._replace(shape=SMALL, layers=1, longest=512))
    make_model.write_model(tmp_path, "small", 700)
    command = [sys.executable, decode.__file__, str(tmp_path), "--formats", "bf16,int8", "--rounds", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in told] == ["bf16", "int8"]
    assert all("share of the floor" in line for line in told)
    refused = subprocess.run([*command, "--formats", "int3"], capture_output=True, text=True, check=False)
    assert "int3" in refused.stderr


def test_what_is_not_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Hugging Face"):
        decode.spec_at(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    with pytest.raises(ValueError, match="quantization_config"):
        decode.spec_at(tmp_path)
