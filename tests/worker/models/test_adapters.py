"""Adapters beside a model compute the same as merged weights, and do not affect other rows."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.worker.adapters.files import adapter_of, factors, merged, scale_of, spelt, write
from tests.worker.kernels.levels import levels
from tests.worker.models.checkpoints import prompts
from tests.worker.models.conftest import Saved
from tests.worker.models.harness import Harness, Row, logits_of
from tests.worker.models.test_oracle import BF16_MEAN

from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.models.recorded import Recorded
from pagoda_worker.rows.slots import NO_ADAPTER

EXACT = 2e-4  # for float32 logits, which have a standard deviation of 1 to 2
MODELS = [
    "llama3",
    "phi3",
    "gpt_neox",
    "gpt2",
    "falcon",
    "cohere",
    "granite",
    "granite4",
    "granite4_moe",
    "qwen2_moe",
    "deepseek_v3",
    "mistral",
]
KERNEL_FAMILIES = ["llama3", "gemma2", "qwen2_moe"]
KERNELS = ["torch", *(["native"] if LIBRARY.exists() else [])]
needs_native = pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; the torch back end serves")


class Family(NamedTuple):
    path: Path
    adapters: list[Path]
    merged: Path


def load(path: Path, adapters: list[Path], **options: Any) -> LoadedModel:
    named = ",".join(f"a{index}={one}" for index, one in enumerate(adapters))
    return load_model(WorkerConfig(model=str(path), lora_modules=named, max_tokens_per_step=1024, **options))


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_computes_what_merged_weights_compute(name: str, saved: Saved, tmp_path: Path) -> None:
    _, path = saved(name)
    adapter, tensors = adapter_of(path, tmp_path / "adapter")
    beside = load(path, [adapter], dtype="float32", kernels="torch")
    whole = merged(path, tensors, tmp_path / "merged", scale_of, spelt(path).names.transposed)
    alone = load_model(WorkerConfig(model=str(whole), dtype="float32", kernels="torch"))
    for tokens in prompts()[-2:]:
        expected = logits_of(alone, tokens, [10**6])
        got = logits_of(beside, tokens, [10**6], slot=0)
        assert (got - expected).abs().max() < EXACT
        assert (logits_of(beside, tokens, [10**6]) - expected).abs().max() > 100 * EXACT, "it changes nothing"


def test_experts_take_none(saved: Saved, tmp_path: Path) -> None:
    _, path = saved("qwen2_moe")
    adapter, tensors = adapter_of(path, tmp_path / "adapter")
    expert = "model.layers.0.mlp.experts.3.down_proj"
    write(adapter, tensors | factors({expert: (64, 32)}))
    with pytest.raises(ValueError, match=rf"a0.*adapters for experts are not supported: .*{expert}\.lora_A"):
        load(path, [adapter], dtype="float32", kernels="torch")


def test_routers_take_none(saved: Saved, tmp_path: Path) -> None:
    _, path = saved("qwen2_moe")
    router = "model.layers.0.mlp.gate"
    adapter = write(tmp_path / "adapter", factors({router: (6, 64)}), target_modules=["gate"])
    with pytest.raises(ValueError, match=rf"adapters for these modules are not supported: .*{router}\.lora_A"):
        load(path, [adapter], dtype="float32", kernels="torch")


def log_probabilities(loaded: LoadedModel, tokens: list[int], slot: int = NO_ADAPTER) -> torch.Tensor:
    return torch.log_softmax(logits_of(loaded, tokens, [10**6], slot).double(), -1)


@pytest.fixture(scope="module", params=KERNEL_FAMILIES)
def family(request: pytest.FixtureRequest, saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A checkpoint, two adapters for it, and the checkpoint with the first merged in."""
    out = tmp_path_factory.mktemp(request.param)
    _, path = saved(request.param)
    first, tensors = adapter_of(path, out / "first")
    second, _ = adapter_of(path, out / "second", seed=2)
    return Family(path, [first, second], merged(path, tensors, out / "merged", scale_of))


@pytest.fixture(params=KERNELS)
def beside(request: pytest.FixtureRequest, family: Family) -> LoadedModel:
    return cached(family.path, tuple(family.adapters), request.param)


@cache
def cached(path: Path, adapters: tuple[Path, ...], kernels: str) -> LoadedModel:
    return load(path, list(adapters), kernels=kernels, dtype="bfloat16")


def test_log_probabilities_in_bfloat16_are_near_those_of_merged_weights(family: Family, beside: LoadedModel) -> None:
    reference = load_model(WorkerConfig(model=str(family.merged), dtype="float32", kernels="reference"))
    tokens = prompts()[-1]
    error = log_probabilities(beside, tokens, 0) - log_probabilities(reference, tokens)
    assert error.abs().mean() < BF16_MEAN


def test_rows_of_many_adapters_and_of_none_do_not_notice_each_other(family: Family, beside: LoadedModel) -> None:
    """Bit for bit, alone or together, in any chunks; rows without an adapter as on a model without adapters."""
    slots = [NO_ADAPTER, 0, 1, 0, NO_ADAPTER, 1, 1, 0]
    harness, rows = Harness(beside), [Row(tokens, slot=slot) for tokens, slot in zip(prompts(), slots, strict=True)]
    harness.prefill(rows, 16)
    plain = load_model(WorkerConfig(model=str(family.path), kernels=beside.ops.name, dtype="bfloat16"))
    for row in rows:
        assert torch.equal(torch.stack(row.logits), logits_of(beside, row.tokens, [10**6], row.slot))
        if row.slot == NO_ADAPTER:
            assert torch.equal(torch.stack(row.logits), logits_of(plain, row.tokens, [10**6]))


def test_prefill_decode_and_chunks_give_the_same_bits(beside: LoadedModel) -> None:
    tokens = prompts()[-1]
    whole = logits_of(beside, tokens, [10**6], 1)
    for chunks in ([1], [16], [37, 1, 1, 5, 200]):
        assert torch.equal(logits_of(beside, tokens, chunks, 1), whole)


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_every_level_adds_beside_every_format(level: str, quantization: str, saved: Saved, tmp_path: Path) -> None:
    """Close to adding the term in float32 with torch to the native layers' own quantised weights."""
    _, path = saved("qwen3")
    adapter, _ = adapter_of(path, tmp_path / "adapter")
    options = {"dtype": "bfloat16", "quantization": quantization}
    native = load(path, [adapter], kernels="native", instruction_set=level, **options)
    reference = load(path, [adapter], kernels="reference", **options)
    tokens = prompts()[-1]
    error = (log_probabilities(native, tokens, 0) - log_probabilities(reference, tokens, 0)).abs()
    base = (log_probabilities(native, tokens) - log_probabilities(reference, tokens)).abs()
    assert error.mean() < 1.5 * base.mean() + 1e-2


@needs_native
def test_recorded_steps_have_the_bits_of_steps_op_by_op(family: Family) -> None:
    loaded = cached(family.path, tuple(family.adapters), "native")
    assert isinstance(loaded.model, Recorded)
    decoder = loaded.model._decoder
    rows = [Row(tokens, slot=slot) for tokens, slot in zip(prompts()[-3:], (0, NO_ADAPTER, 1), strict=True)]
    again = [Row(row.tokens, slot=row.slot) for row in rows]
    Harness(loaded).prefill(rows, 20)
    Harness(dataclasses.replace(loaded, model=decoder)).prefill(again, 20)
    for one, other in zip(rows, again, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
