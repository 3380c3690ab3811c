"""How much of a text repeats earlier text, and which texts are chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.copying import begins_whole, choose, copied_share

from pagoda.bench.workload import read_rows

SCRIPT = Path(__file__).parents[2] / "bench/copying.py"


@pytest.mark.parametrize(
    ("before", "text", "share"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4], 1.0),
        ([1, 2, 3, 4, 1, 2], [9, 3], 0.0),
        ([1, 2, 3, 4], [5, 6, 7], 0.0),
        ([1, 2, 1], [2, 1, 2, 1], 0.75),  # the first 2 is new: nothing followed (2, 1) before
        ([1, 2, 5, 1, 2, 6, 1, 2], [6], 1.0),  # the latest occurrence counts
        ([1, 2, 5, 1, 2, 6, 1, 2], [5], 0.0),
    ],
)
def test_the_share_that_a_lookup_foretells(before: list[int], text: list[int], share: float) -> None:
    assert copied_share(before, text) == share


def test_texts_that_repeat_about_as_often_as_asked_for_are_taken() -> None:
    texts = [[1, 2, 3, 4, 5, 6], [1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 4]]
    assert choose(texts, prompt_len=4, count=2, wanted=0.9) == [(1.0, texts[1]), (0.0, texts[0])]
    assert choose(texts, prompt_len=5, count=1, wanted=0.1) == [(0.0, texts[0])]


def test_an_answer_must_begin_with_text() -> None:
    class Letters:
        def decode(self, tokens: list[int]) -> str:
            return {1: "a", 2: "\ufffd", 3: "b\ufffd"}[tokens[0]]

    assert begins_whole(Letters(), [1, 3, 1])  # type: ignore[arg-type]
    assert not begins_whole(Letters(), [1, 2])  # type: ignore[arg-type]


@pytest.mark.e2e
def test_the_workload_of_the_demo_model_repeats_itself(tmp_path: Path) -> None:
    out = tmp_path / "copy.jsonl"
    words = ["", "--out", str(out), "--texts", "4", "--requests", "2", "--prompt-len", "96", "--output-len", "32"]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    rows = read_rows(out)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(96, 32)] * 2
    assert all(isinstance(row.prompt, list) and len(row.prompt) == 96 for row in rows)
    assert 0.2 < told["copied_share"] <= 1
