"""Whole models with int8 keys and values: bits independent of the batch, and close to those with a bfloat16 cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.worker.models.checkpoints import FALLBACK, NATIVE, make_model, prompts, save
from tests.worker.models.harness import BLOCK_SIZE, Harness, Row, logits_of

from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.loading.foresight import contexts_of
from pagoda_worker.loading.memory import num_kv_blocks
from pagoda_worker.loading.model import LoadedModel, load_model

# Latents without experts: rounding can change which experts are chosen, and then results differ a lot.
MODELS = NATIVE | FALLBACK | {"latents": ("deepseek_v3", NATIVE["deepseek_v3"][1] | {"first_k_dense_replace": 3})}
NAMES = ["llama", "mistral", "qwen3", "gemma3", "latents"]
KERNELS = ["torch", *(["native"] if LIBRARY.exists() else [])]
Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def checkpoint(name: str) -> Path:
        return save(make_model(*MODELS[name]), tmp_path_factory.mktemp(name), torch.bfloat16)

    @cache
    def make(name: str, kernels: str, kv_cache_dtype: str = "int8", dtype: str = "bfloat16") -> LoadedModel:
        config = WorkerConfig(
            model=str(checkpoint(name)), kernels=kernels, kv_cache_dtype=kv_cache_dtype, dtype=dtype,
            max_tokens_per_step=1024,
        )  # fmt: skip
        return load_model(config)

    return make


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [[1], [16], [37, 1, 1, 5, 200]])
def test_bits_do_not_depend_on_chunks(load: Load, name: str, kernels: str, chunks: list[int]) -> None:
    model, tokens = load(name, kernels), prompts(longest=280)[-1]
    assert torch.equal(logits_of(model, tokens, chunks), logits_of(model, tokens, [10**6]))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_company(load: Load, name: str, kernels: str) -> None:
    model, lists = load(name, kernels), prompts(longest=280)
    alone = [logits_of(model, tokens, [10**6]) for tokens in lists]
    harness, rows = Harness(model), [Row(tokens) for tokens in lists]
    harness.prefill(rows, 23)
    for row, expected in zip(rows, alone, strict=True):
        assert torch.equal(torch.stack(row.logits), expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_prefix_hits_and_copied_blocks_change_no_bits(load: Load, kernels: str) -> None:
    model, ids = load("qwen3", kernels), prompts(longest=100)[-1]
    harness, first = Harness(model), Row(ids)
    harness.prefill([first], 40)
    hit = Row(ids, blocks=first.blocks[:3], computed=3 * BLOCK_SIZE)
    copies = [harness.free.pop() for _ in first.blocks]
    with torch.inference_mode():
        for group in harness.kv:
            model.ops.copy_blocks(group, list(zip(first.blocks, copies, strict=True)))
    fork = Row(ids, blocks=copies, computed=70)
    harness.prefill([hit, fork], 1000)
    for row, start in ((hit, 3 * BLOCK_SIZE), (fork, 70)):
        assert torch.equal(torch.stack(row.logits), torch.stack(first.logits)[start:])


@pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; the torch back end serves")
def test_recorded_equals_op_by_op(load: Load) -> None:
    native = load("qwen3", "native")
    by_op = dataclasses.replace(native, model=native.model._decoder)  # type: ignore[attr-defined]
    for tokens in prompts(longest=120)[-2:]:
        assert torch.equal(logits_of(native, tokens, [50]), logits_of(by_op, tokens, [50]))


def log_probabilities(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(logits_of(loaded, tokens, [10**6]).double(), -1)


# Mean change that int8 rounding makes to the log-probabilities of likely tokens. These random models amplify any
# rounding, since their weights are scaled up until logits are far apart: bfloat16 is allowed 0.35 against float32.
BOUND = 0.06


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_stay_near_those_over_bfloat16(load: Load, name: str, kernels: str) -> None:
    for tokens in prompts(longest=280)[-2:]:
        expected = log_probabilities(load(name, kernels, "auto"), tokens)
        got = log_probabilities(load(name, kernels), tokens)
        assert not torch.equal(got, expected)
        assert (got - expected)[expected > -6].abs().mean() < BOUND


@pytest.mark.parametrize("name", [*NAMES[:-1], "deepseek_v3"])
def test_torch_and_reference_round_alike_in_float32(load: Load, name: str) -> None:
    tokens = prompts(longest=150)[-1]
    expected = log_probabilities(load(name, "reference", "int8", "float32"), tokens)
    got = log_probabilities(load(name, "torch", "int8", "float32"), tokens)
    plain = log_probabilities(load(name, "reference", "auto", "float32"), tokens)
    # A number between two levels may rarely be rounded to either side because of float32's last bit: in "latents" one
    # is, in a token that all others attend to, but none in the same model with experts.
    assert (got - expected).abs().mean() < 0.01 * (plain - expected).abs().mean()


@pytest.mark.parametrize("kernels", ["reference", *KERNELS])
def test_the_numerics_and_the_size_of_the_cache_follow(load: Load, kernels: str) -> None:
    plain, rounded = load("qwen3", kernels, "auto"), load("qwen3", kernels)
    assert plain.numerics_id != rounded.numerics_id
    assert plain.fingerprint == rounded.fingerprint
    assert sum(group.bytes_per_token for group in plain.kv_groups) == 3 * 2 * 2 * 32 * 2
    assert sum(group.bytes_per_token for group in rounded.kv_groups) == 3 * 2 * 2 * (32 + 4)
    config = WorkerConfig(kv_cache_gib=0.1, block_size=32)
    assert num_kv_blocks(config, rounded) == num_kv_blocks(config, plain) * 64 // 36


def test_models_through_transformers_refuse(load: Load) -> None:
    with pytest.raises(UnsupportedConfig, match="kv_cache_dtype=int8: models that run through transformers"):
        load("gpt2_scaled", "auto")


@pytest.mark.skipif("native" not in KERNELS, reason="no C++ compiler here")
def test_what_native_cannot_round_is_known_before_anything_is_loaded(tmp_path: Path) -> None:
    wide = NATIVE["deepseek_v3"][1] | {"kv_lora_rank": 256, "first_k_dense_replace": 3}
    path = str(save(make_model("deepseek_v3", wide), tmp_path, torch.bfloat16))
    config = WorkerConfig(model=path, kernels="native", kv_cache_dtype="int8", device="cpu")
    with pytest.raises(ValueError, match=r"native cannot serve attention: .* heads of up to 256 dimensions, not 272"):
        contexts_of(config)
    loaded = load_model(dataclasses.replace(config, kernels="auto"))
    expected = load_model(dataclasses.replace(config, kernels="native,attention=torch"))
    assert loaded.ops.name == expected.ops.name
    tokens = prompts(longest=70)[-1]
    assert torch.equal(logits_of(loaded, tokens, [16]), logits_of(expected, tokens, [10**6]))


def test_an_unknown_kind_of_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, int8, got 'fp8'"):
        WorkerConfig(kv_cache_dtype="fp8")
