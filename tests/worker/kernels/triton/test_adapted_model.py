"""A model with adapters on this back end computes the same as merged weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from tests.worker.adapters.files import adapter_of, merged, scale_of
from tests.worker.kernels.triton.support import DEVICE, moved
from tests.worker.models.checkpoints import NATIVE, make_model, prompts, save
from tests.worker.models.harness import Harness, Row, logits_of

from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import Model, load_model
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots

EXACT = 2e-4  # of float32 logits, as in tests/worker/models/test_adapters.py


class OnDevice:
    """A model that accepts tensors on the host."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        return self._model.forward(moved(batch), kv)

    def logits(self, hidden: torch.Tensor, *, slots: TokenSlots | None = None) -> torch.Tensor:
        logits = self._model.logits(hidden) if slots is None else self._model.logits(hidden, slots=slots)
        return logits.cpu()


def test_rows_of_two_adapters_and_of_none_compute_what_merged_weights_compute(tmp_path: Path) -> None:
    """Rows of different ranks in the same steps give the tokens that merged weights give."""
    path = save(make_model(*NATIVE["llama3"]), tmp_path / "llama3")
    pairs = [adapter_of(path, tmp_path / f"adapter{seed}", seed=seed) for seed in (1, 2)]
    named = ",".join(f"a{index}={adapter}" for index, (adapter, _) in enumerate(pairs))
    options: dict[str, Any] = {"dtype": "float32", "kernels": "triton", "device": DEVICE.type}
    loaded = load_model(WorkerConfig(model=str(path), lora_modules=named, **options))
    assert loaded.ops.name == "triton"
    tokens = prompts()[3]
    rows = [Row(tokens, slot=slot) for slot in (1, NO_ADAPTER, 0)]
    Harness(replace(loaded, model=OnDevice(loaded.model))).prefill(rows, 7)
    whole = [merged(path, tensors, tmp_path / f"merged{index}", scale_of) for index, (_, tensors) in enumerate(pairs)]
    found = []
    for row, checkpoint in zip(rows, (whole[1], path, whole[0]), strict=True):
        alone = load_model(WorkerConfig(model=str(checkpoint), dtype="float32", kernels="torch", device="cpu"))
        expected, got = logits_of(alone, tokens, [10**6]), torch.stack(row.logits)
        assert (got - expected).abs().max() < EXACT
        assert torch.equal(got.argmax(1), expected.argmax(1))
        found.append(expected)
    for one, other in combinations(found, 2):
        assert (one - other).abs().max() > 100 * EXACT, "two of them are alike"
