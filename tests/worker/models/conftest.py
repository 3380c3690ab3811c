"""Checkpoints and loaded models, made once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.worker.models.checkpoints import FALLBACK, NATIVE, SLIDING, make_model, save

from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model

Saved = Callable[[str], tuple[Any, Path]]
Loaded = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Name -> (transformers' float32 model with eager attention, directory of its checkpoint)."""
    transformers.logging.disable_progress_bar()

    @cache
    def make(name: str) -> tuple[Any, Path]:
        model = make_model(*(NATIVE | SLIDING | FALLBACK)[name])
        return model, save(model, tmp_path_factory.mktemp("checkpoint") / name)

    return make


@pytest.fixture(scope="session")
def loaded(saved: Saved) -> Loaded:
    """(name, dtype, kernels) -> the model as a worker loads it."""

    @cache
    def load(name: str, dtype: str = "float32", kernels: str = "torch") -> LoadedModel:
        config = WorkerConfig(model=str(saved(name)[1]), dtype=dtype, kernels=kernels, fallback=name in FALLBACK)
        return load_model(config)

    return load
