"""A model with more positions than memory allows is refused before a rotary table is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.encoders import checkpoints as encoders
from tests.worker.models.checkpoints import NATIVE, make_model, save

from pagoda_worker.checkpoints.rope import RopeShape, RotaryTable
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.readers import load_any_model
from pagoda_worker.models import tables
from pagoda_worker.models.tables import TooManyPositions, rotary_tables

CPU = torch.device("cpu")
MIB = 2**20
SHAPE = RopeShape(theta=1e4, head_dim=64)  # 256 bytes per position


def with_positions(path: Path, count: int, **more: Any) -> WorkerConfig:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": count} | more))
    return WorkerConfig(model=str(path), kernels="torch")


def refusing(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    """Simulate this much memory, and fail if a table is made."""

    def unmade(*_: Any) -> RotaryTable:
        raise AssertionError("a table was made")

    monkeypatch.setattr(tables, "available_bytes", lambda device: available)
    monkeypatch.setattr(tables, "RotaryTable", unmade)


def test_tables_may_have_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "available_bytes", lambda device: MIB)
    assert len(rotary_tables([SHAPE, SHAPE], 1024, CPU)) == 2
    assert rotary_tables([], 1024, CPU, others=512) == []
    for shapes, length, others in (([SHAPE, SHAPE], 1025, 0), ([SHAPE], 1024, 257), ([], 1024, 513)):
        with pytest.raises(TooManyPositions, match=rf"for {length} tokens.*more than 50% of .* max_model_len"):
            rotary_tables(shapes, length, CPU, others)


def test_a_decoder_is_refused_before_any_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_positions(save(make_model(*NATIVE["llama"]), tmp_path, torch.bfloat16), 2**24)
    refusing(monkeypatch, 64 * MIB)
    with pytest.raises(TooManyPositions, match="16777216 tokens"):
        load_any_model(config, None)


def test_an_encoder_s_bias_by_distance_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders.save(tmp_path, "mpnet")
    config = WorkerConfig(model=str(tmp_path), kernels="torch")
    refusing(monkeypatch, 1024)
    with pytest.raises(TooManyPositions, match="lower max_model_len"):
        load_any_model(config, None)


def test_an_encoder_that_turns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders.save(tmp_path, "modernbert")
    config = with_positions(tmp_path, 2**24)
    refusing(monkeypatch, 64 * MIB)
    with pytest.raises(TooManyPositions, match="16777216 tokens"):
        load_any_model(config, None)
