"""gpt-oss with experts in MXFP4 gives the model of its dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.models.checkpoints import NATIVE, make_model, prompts, save
from tests.worker.models.gguf_models import write_gguf
from tests.worker.models.harness import logits_of

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.formats import read_layout
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.loading.model import LoadedModel, load_model

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
STACKS = ("gate_up_proj", "down_proj")
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [E, N, K] -> blocks, scales, and the dequantised weight."""
    grouped = weight.double().unflatten(-1, (-1, 32))
    exponents = (grouped.abs().amax(-1) / 6.0).log2().ceil()
    scaled = grouped / exponents.exp2().unsqueeze(-1)
    known = torch.tensor(E2M1, dtype=torch.float64)
    magnitudes = (scaled.abs().unsqueeze(-1) - known).abs().argmin(-1)
    codes = (magnitudes + 8 * (scaled < 0)).to(torch.uint8)
    numbers = known[magnitudes] * scaled.sign() * exponents.exp2().unsqueeze(-1)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8), numbers.flatten(-2).float()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model with the dequantised weights, and the checkpoint with the blocks."""
    model, path = make_model(*NATIVE["gpt_oss"]), tmp_path_factory.mktemp("mxfp4")
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(STACKS):
                blocks, scales, numbers = packed(parameter.mT)
                parameter.copy_(numbers.mT)
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save(model, path)
    plain = load_file(path / "model.safetensors")
    tensors |= {name: tensor for name, tensor in plain.items() if not name.endswith(STACKS)}
    save_file(tensors, path / "model.safetensors")
    said(path, METHOD)
    return model, path


def said(path: Path, method: dict[str, Any]) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": method}))


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(WorkerConfig(**{"model": str(path), "fallback": False, **options}))


@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_it_is_the_model_of_its_numbers(written: tuple[Any, Path], kernels: str) -> None:
    (model, path), ids = written, prompts()[-1]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    got = logits_of(load(path, dtype="float32", kernels=kernels), ids, [50])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; the torch back end serves")
def test_native_kernels_take_blocks_as_they_are(written: tuple[Any, Path], caplog: pytest.LogCaptureFixture) -> None:
    (model, path), ids = written, prompts()[-1]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    with caplog.at_level("INFO"):
        loaded = load(path, dtype="bfloat16", kernels="native")
    assert "weights: float4 group 32" in caplog.text
    got, widened = logits_of(loaded, ids, [50]), logits_of(load(path, dtype="bfloat16", kernels="torch"), ids, [50])
    error, other = ((one.log_softmax(-1) - expected).abs().mean() for one in (got, widened))
    assert error < 1.25 * other + 1e-3
    assert torch.equal(logits_of(loaded, ids, [7]), got)


@pytest.mark.parametrize(
    ("kernels", "dtype"), [("torch", "float32"), *([("native", "bfloat16")] if LIBRARY.exists() else [])]
)
def test_a_gguf_file_of_it_is_the_same_model(
    written: tuple[Any, Path], kernels: str, dtype: str, tmp_path: Path
) -> None:
    (model, path), ids = written, prompts()[-1]
    ours = load(write_gguf(path, model.config, "gpt-oss", tmp_path / "m.gguf"), dtype=dtype, kernels=kernels)
    assert torch.equal(logits_of(ours, ids, [50]), logits_of(load(path, dtype=dtype, kernels=kernels), ids, [50]))


def test_what_is_refused_is_named(written: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = written
    for option in ("int8", "int4", "int4a16"):
        with pytest.raises(UnsupportedConfig, match=rf"quantization='{option}'.*mxfp4: float4 group 32"):
            load(path, quantization=option)
    with pytest.raises(UnsupportedConfig, match="'modules_to_not_convert' must not name experts"):
        read_layout({"quantization_config": METHOD | {"modules_to_not_convert": ["model.layers.0.mlp.experts"]}})
    with pytest.raises(UnsupportedConfig, match="not supported natively: unheard_of"):
        read_layout({"quantization_config": METHOD | {"unheard_of": 1}})
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][..., :1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"wrong shapes: {name}"):
        load(tmp_path)


def test_models_without_such_experts_are_refused(tmp_path: Path) -> None:
    path = save(make_model(*NATIVE["llama"]), tmp_path)
    said(path, METHOD)
    with pytest.raises(UnsupportedConfig, match="mxfp4 needs experts stored in one tensor"):
        load(path)
