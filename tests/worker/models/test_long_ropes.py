"""RoPE scalings that depend on a row's length: fixed at the longest possible row, and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.worker.models.checkpoints import NATIVE, make_model, save
from tests.worker.models.harness import Harness, logits_of

from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model

TRAINED, LONG = 48, 80
IDS = torch.randint(3, 256, (LONG,), generator=torch.Generator().manual_seed(8)).tolist()


def load(path: Path, max_model_len: int = 0) -> LoadedModel:
    config = WorkerConfig(
        model=str(path), dtype="float32", kernels="torch", fallback=False, max_model_len=max_model_len
    )
    return load_model(config)


def log_probabilities(model: Any, length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS[:length]])).logits[0].log_softmax(-1)


def assert_agrees(loaded: LoadedModel, model: Any, length: int) -> None:
    found = logits_of(loaded, IDS[:length], [7, 30, 1]).log_softmax(-1)
    torch.testing.assert_close(found, log_probabilities(model, length), rtol=0, atol=1e-3)


def test_dynamic_angles_are_those_of_a_row_of_the_longest_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make_model("llama", {"rope_parameters": rope, "max_position_embeddings": TRAINED})
    path = save(model, tmp_path)
    usual, longer = load(path), load(path, LONG)
    assert (usual.max_model_len, longer.max_model_len) == (TRAINED, LONG)
    assert_agrees(usual, model, TRAINED)
    assert_agrees(longer, model, LONG)
    assert usual.numerics_id == load(path, TRAINED - 8).numerics_id != longer.numerics_id
    assert load(path, LONG - 1).numerics_id != longer.numerics_id
    whole = logits_of(longer, IDS, [LONG])
    assert torch.equal(logits_of(longer, IDS[:20], [20]), whole[:20])


def test_long_factors_serve_where_a_row_may_be_long(tmp_path: Path) -> None:
    model_type, changes = NATIVE["phi4"]
    model = make_model(model_type, changes | {"original_max_position_embeddings": TRAINED})
    path = save(model, tmp_path)
    usual, shorter = load(path), load(path, TRAINED)
    assert_agrees(usual, model, LONG)
    assert_agrees(shorter, model, TRAINED)
    assert usual.numerics_id == load(path, TRAINED + 1).numerics_id != shorter.numerics_id
    assert Harness(usual).greedy([IDS[:9]], 4) != Harness(shorter).greedy([IDS[:9]], 4)
