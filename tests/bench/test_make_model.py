"""bench/make_model.py: its output can be served, unquantised and in int8."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from bench import make_model
from pagoda import LLM, SamplingParams
from pagoda_worker.kernels.roofline import ModelShape

SCRIPT = Path(make_model.__file__)
SMALL = ModelShape(name="small", hidden=64, middle=128, heads=4, kv_heads=2, head_dim=16, vocab=600)


@pytest.mark.parametrize(
    ("name", "rounded"),
    [*itertools.product(("b135m", "g7", "b600m"), (False, True)), ("granite-moe", False), ("olmoe", False)],
)
def test_what_is_written_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rounded: bool) -> None:
    model = make_model.MODELS[name]
    monkeypatch.setitem(make_model.MODELS, "small", model._replace(shape=SMALL, layers=2, longest=128))
    make_model.write_model(tmp_path, "small", 700)
    if rounded:
        make_model.round_weights(tmp_path)
    tokenizer = make_model.tokenizer_of(700)
    assert tokenizer.decode(tokenizer.encode("abc of it").ids) == "abc of it"
    with LLM(str(tmp_path), kv_cache_gib=0.01) as llm:
        assert llm.vocab_size == 700
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        assert len(llm.generate(["abc of it"], params)[0].outputs[0].token_ids) == 4


def test_every_shape_of_a_published_figure_can_be_named(tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True).stdout
    assert "{b135m,b600m,b1b,8b,g7,granite-moe,olmoe}" in told
    refused = subprocess.run([sys.executable, str(SCRIPT), "b600m", str(tmp_path)], capture_output=True, check=False)
    assert refused.returncode != 0
