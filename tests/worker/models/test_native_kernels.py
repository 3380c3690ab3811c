"""Whole models on the native kernels: close to the reference, bits independent of the batch, recorded or op by op."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.worker.kernels.levels import levels
from tests.worker.models.checkpoints import KERNEL_FAMILIES, NATIVE, make_model, prompts, save
from tests.worker.models.harness import Harness, Row, logits_of, make_batch

from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernel_choice import FAMILIES
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.models.recorded import Recorded

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; the torch back end serves")
TOLERANCE = 0.35  # for log-probabilities, bfloat16 against the reference in float32; see test_log_probabilities


@pytest.fixture(scope="module", params=KERNEL_FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, changes = NATIVE[request.param]
    return save(make_model(model_type, changes), tmp_path_factory.mktemp(request.param), torch.bfloat16)


def load(path: Path, **options: str) -> LoadedModel:
    return load_model(WorkerConfig(model=str(path), max_tokens_per_step=1024, **options))


@pytest.fixture(scope="module")
def native(path: Path) -> LoadedModel:
    """Shared by all tests of a model, since they only read its weights."""
    return load(path, kernels="native")


def log_probabilities(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(logits_of(loaded, tokens, [10**6]).double(), -1)


def test_log_probabilities(path: Path, native: LoadedModel) -> None:
    """Likely tokens agree with the reference at least as well as on the torch back end in bfloat16."""
    reference, by_torch = load(path, kernels="reference", dtype="float32"), load(path, kernels="torch")
    errors, others = [], []
    for tokens in prompts(longest=300)[-3:]:
        expected = log_probabilities(reference, tokens)
        likely = expected > -6
        errors.append((log_probabilities(native, tokens) - expected)[likely].abs())
        others.append((log_probabilities(by_torch, tokens) - expected)[likely].abs())
        assert errors[-1].mean() < TOLERANCE
    assert torch.cat(errors).mean() < 1.25 * torch.cat(others).mean() + 1e-3


@pytest.mark.parametrize("chunks", [[1], [16], [64], [37, 1, 1, 5, 200]])
def test_bits_do_not_depend_on_chunks(native: LoadedModel, chunks: list[int]) -> None:
    tokens = prompts(longest=300)[-1]
    assert torch.equal(logits_of(native, tokens, chunks), logits_of(native, tokens, [10**6]))


def test_bits_do_not_depend_on_company(native: LoadedModel) -> None:
    lists = prompts(longest=280)
    alone = [logits_of(native, tokens, [10**6]) for tokens in lists]
    harness, rows = Harness(native), [Row(tokens) for tokens in lists]
    harness.prefill(rows, 23)
    for row, expected in zip(rows, alone, strict=True):
        assert torch.equal(torch.stack(row.logits), expected)


def test_recorded_equals_op_by_op(native: LoadedModel) -> None:
    decoder = native.model._decoder  # type: ignore[attr-defined]
    by_op = dataclasses.replace(native, model=decoder)
    for tokens in prompts(longest=120)[-2:]:
        assert torch.equal(logits_of(native, tokens, [50]), logits_of(by_op, tokens, [50]))


def test_a_decode_step_is_one_call_with_the_same_bits(native: LoadedModel) -> None:
    model, kv = native.model, native.new_kv_cache(6, 32)
    assert isinstance(model, Recorded)
    with torch.inference_mode():
        model.forward(make_batch([([7] * 40, 0, [0, 1]), ([9] * 33, 0, [2, 3])], 32), kv)
        batch = make_batch([([3], 40, [0, 1]), ([4], 33, [2, 3])], 32)
        decoded = model.decoded(batch, kv)
        assert decoded is not None
        assert model.decoded(dataclasses.replace(batch, logit_indices=batch.logit_indices[:1]), kv) is None
        hidden, logits = (result.clone() for result in decoded)
        assert torch.equal(hidden, model.forward(batch, kv))
        assert torch.equal(logits, model.logits(hidden))


@pytest.mark.parametrize("level", levels())
def test_every_level_computes_the_same_model(path: Path, native: LoadedModel, level: str) -> None:
    """Each level of this machine, compared with the best."""
    one = load(path, kernels="native", instruction_set=level)
    assert (one.numerics_id == native.numerics_id) is (level == levels()[-1])
    tokens = prompts()[-1]
    difference = log_probabilities(one, tokens) - log_probabilities(native, tokens)
    assert difference.abs().mean() < TOLERANCE


def test_what_the_kernels_cannot_do_is_an_error_when_named_and_a_fallback_otherwise(path: Path) -> None:
    with pytest.raises(BackendError, match="bfloat16, not in float32"):
        load(path, kernels="native", dtype="float32")
    assert load(path, dtype="float32").ops.name == "torch"
    assert load(path).ops.name == "native"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("other", ["torch", "reference"])
def test_any_family_by_another_back_end(path: Path, native: LoadedModel, family: str, other: str) -> None:
    """A family on another back end is named, gives the same model and, on torch, keeps bits independent of chunks."""
    tokens = prompts(longest=120)[-1]
    mixed = load(path, kernels=f"native,{family}={other}")
    assert f"{family} {other}" in mixed.ops.name
    assert mixed.numerics_id != native.numerics_id
    difference = log_probabilities(mixed, tokens) - log_probabilities(native, tokens)
    assert difference.abs().mean() < TOLERANCE
    if other == "torch":
        assert torch.equal(logits_of(mixed, tokens, [16]), logits_of(mixed, tokens, [10**6]))


def test_a_model_with_an_odd_width_has_its_linear_layers_by_torch(tmp_path: Path) -> None:
    model_type, changes = NATIVE["llama"]
    path = save(make_model(model_type, changes | {"intermediate_size": 97}), tmp_path, torch.bfloat16)
    loaded, tokens = load(path), prompts()[-1]
    assert loaded.ops.name == "linear torch, pointwise native, attention native, sampling native"
    reference = load(path, kernels="reference", dtype="float32")
    difference = log_probabilities(loaded, tokens) - log_probabilities(reference, tokens)
    assert difference.abs().mean() < TOLERANCE
    with pytest.raises(BackendError, match="got 97"):
        load(path, kernels="native")
