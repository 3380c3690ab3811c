from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.model_dir import byte_level_tokenizer
from tests.worker.models.checkpoints import NATIVE, make_model, save

Saved = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A native family's tiny model and the directory that it is saved in, each made once."""

    @cache
    def make(name: str) -> tuple[Any, Path]:
        model, path = make_model(*NATIVE[name]), tmp_path_factory.mktemp(name)
        byte_level_tokenizer().save(str(path / "tokenizer.json"))  # every model directory has one; prompts are ids here
        return model, save(model, path)

    return make
