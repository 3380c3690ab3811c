from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.checkpoints.reading import vocabulary


@pytest.mark.parametrize("vocab", [{"a": 0, "yes": 1}, [["a", -1.5], ["yes", -2.5]]])
def test_a_vocabulary_has_what_was_added_to_it(vocab: Any, tmp_path: Path) -> None:
    added = [{"content": "[Q]", "id": 7}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    assert vocabulary(tmp_path) == {"a": 0, "yes": 1, "[Q]": 7}


@pytest.mark.parametrize(
    "odd",
    [
        {"model": []}, {"model": {"vocab": [[]]}}, {"model": {"vocab": 3}}, {"model": {"vocab": [3]}},
        {"model": {"vocab": {"a": "0"}}}, {"model": {"vocab": {"a": None}}},
        {"added_tokens": [{"content": "a", "id": "7"}]}, {"added_tokens": [{"content": [], "id": 7}]},
        {"added_tokens": [{}]}, {"added_tokens": ["x"]}, {"added_tokens": 3},
    ],
)  # fmt: skip
def test_other_forms_are_refused_by_the_files_name(odd: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(odd))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its vocabulary"):
        vocabulary(tmp_path)
