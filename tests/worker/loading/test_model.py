"""What a loaded model says about itself, and what the loader refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.worker.fakes_capturable import CapturableOps
from tests.worker.models.checkpoints import NATIVE, make_model, prompts, save
from tests.worker.models.harness import logits_of

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading import model as loading
from pagoda_worker.loading.memory import num_kv_blocks
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.fallback import TransformersModel
from pagoda_worker.models.recorded import Recorded


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(*NATIVE["qwen3"]), tmp_path_factory.mktemp("qwen3"), torch.bfloat16)


@pytest.fixture(scope="module")
def config(path: Path) -> WorkerConfig:
    return WorkerConfig(model=str(path), kernels="torch", fallback=False, block_size=32)


def copy_of(path: Path, target: Path, **changes: Any) -> Path:
    fields = json.loads((path / "config.json").read_text()) | changes
    target.mkdir()
    (target / "config.json").write_text(json.dumps(fields))
    (target / "model.safetensors").symlink_to(path / "model.safetensors")
    return target


def test_facts(config: WorkerConfig) -> None:
    model = load_model(config)
    assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))
    assert not isinstance(model.model, TransformersModel)
    assert (model.vocab_size, model.max_model_len) == (256, 1024)
    assert sum(group.bytes_per_token for group in model.kv_groups) == 3 * 2 * 2 * 32 * 2
    assert num_kv_blocks(replace(config, num_blocks=64), model) == 64


def test_adapters_come_from_a_directory_that_is_there(config: WorkerConfig, path: Path, tmp_path: Path) -> None:
    for none in (tmp_path / "none", path / "config.json"):
        with pytest.raises(ValueError, match=f"lora_dir: there is no directory '{none}' here"):
            load_model(replace(config, lora_dir=str(none)))


def test_the_chosen_gpu_is_the_current_one_before_anything_is_launched(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_current(device: torch.device) -> None:
        raise RuntimeError(f"{device} is current")

    monkeypatch.setattr(loading, "choose_device", torch.device)
    monkeypatch.setattr(loading, "load_ops", lambda *_: pytest.fail("kernels are checked on another device"))
    monkeypatch.setattr(torch.cuda, "set_device", make_current)
    with pytest.raises(RuntimeError, match="cuda:1 is current"):
        load_model(replace(config, device="cuda:1"))


def test_progress_counts_every_byte_once(config: WorkerConfig, path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(config, lambda done, of: seen.append((done, of)))
    total = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)


def test_progress_can_end_the_loading(config: WorkerConfig) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(config, stop)


def test_identity(config: WorkerConfig, path: Path, tmp_path: Path) -> None:
    """The fingerprint depends on the weights and config.json; the numerics on dtype and back end."""

    def identity(changed: WorkerConfig) -> tuple[str, str]:
        model: LoadedModel = load_model(changed)
        return model.fingerprint, model.numerics_id

    first = identity(config)
    assert identity(config) == first
    assert identity(replace(config, model=str(copy_of(path, tmp_path / "same")))) == first
    other = identity(replace(config, model=str(copy_of(path, tmp_path / "other", rms_norm_eps=1e-5))))
    assert other[0] != first[0]
    assert other[1] == first[1]
    for changed in (replace(config, dtype="float32"), replace(config, kernels="reference")):
        fingerprint, numerics = identity(changed)
        assert fingerprint == first[0]
        assert numerics != first[1]


@pytest.mark.parametrize(
    ("named", "choice", "dtype"),
    [
        ("float16", "auto", torch.bfloat16),
        ("float16", "float16", torch.float16),
        ("float32", "auto", torch.float32),
        (None, "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_dtype(
    config: WorkerConfig, path: Path, tmp_path: Path, named: str | None, choice: str, dtype: torch.dtype
) -> None:
    where = copy_of(path, tmp_path / "dtype", dtype=named)
    assert load_model(replace(config, model=str(where), dtype=choice)).dtype == dtype


def test_shards_are_the_same_model(config: WorkerConfig, tmp_path: Path) -> None:
    path = tmp_path / "shards"
    make_model(*NATIVE["qwen3"]).to(torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    ids = prompts()[4]
    whole = logits_of(load_model(config), ids, [len(ids)])
    sharded = load_model(replace(config, model=str(path)))
    assert torch.equal(logits_of(sharded, ids, [len(ids)]), whole)
    assert sharded.fingerprint == load_model(config).fingerprint


def test_max_model_len(config: WorkerConfig) -> None:
    assert load_model(replace(config, max_model_len=100)).max_model_len == 100
    with pytest.raises(ValueError, match=r"max_model_len=1025 exceeds the model's own limit of 1024"):
        load_model(replace(config, max_model_len=1025))


def test_tensors_that_do_not_fit(config: WorkerConfig, path: Path, tmp_path: Path) -> None:
    where = copy_of(path, tmp_path / "wide", intermediate_size=95, num_hidden_layers=4, layer_types=None)
    with pytest.raises(
        CheckpointError, match=r"missing tensors: model\.layers\.3.*wrong shapes: model\.layers\.0\.mlp"
    ):
        load_model(replace(config, model=str(where)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config.*gptq"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
        ({"architectures": None}, "no native implementation"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_refusals(config: WorkerConfig, path: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    where = copy_of(path, tmp_path / "refused", **changes)
    with pytest.raises(UnsupportedConfig, match=message):
        load_model(replace(config, model=str(where)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_what_biases_the_choice_of_experts_must_be_finite(family: str, value: float, tmp_path: Path) -> None:
    """No logit would show it: the bias only chooses."""
    model = make_model(*NATIVE[family])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name)[2] = value
    where = save(model, tmp_path, torch.bfloat16)
    with pytest.raises(CheckpointError, match=re.escape(f"{name} has values that are not finite")):
        load_model(WorkerConfig(model=str(where), kernels="torch", fallback=False))


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        load_model(WorkerConfig(model=str(tmp_path)))


def test_a_back_end_that_a_device_can_record_gets_the_decoder_itself(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(load_model(config).model, Recorded)
    monkeypatch.setattr("pagoda_worker.loading.model.load_ops", lambda *_: (CapturableOps(torch.device("cpu")), []))
    assert isinstance(load_model(config).model, Decoder)


def test_spare_blocks_lie_behind_those_of_rows(config: WorkerConfig) -> None:
    loaded = replace(load_model(replace(config, kernels="torch")), spare_blocks=2)
    assert [cache.num_blocks for cache in loaded.new_kv_cache(5, 16)] == [7]  # type: ignore[attr-defined]
