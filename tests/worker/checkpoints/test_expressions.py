"""Regular expressions from published models' files match as with `re`; those that could take long are refused."""

from __future__ import annotations

import re

import pytest

from pagoda_worker.checkpoints.expressions import compiled, sides

LAYER = "model.layers.11"
NAMES = [
    "lm_head", f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts.3.down_proj",
    "model.visual.blocks.0.q_proj", "model.language_model.layers.2.mlp.up_proj",
]  # fmt: skip
USUAL = [
    r".*lm_head", r".*mlp.gate$", r".*mlp\.experts\..*\.(gate|up|down)_proj$", r".*vis(ion|ual).*", r"(?:.*\.)?lm_head",
    r"model\.layers\.(0|1|2|3|4|5|6|7|8|9|10|11)\..*", r"^(?!.*experts).*$", r".*(?<!visual)\.blocks\.0\.q_proj",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
    r".*embed.*|.*norm.*|.*lm_head.*|.*mlp.gate.*", r"(?P<kind>q|k)_proj|.*[|)]x|.*\|y",
    r".*layers\.\d+\.mlp\.experts\.\d+\..*_proj", r"model.language_model.layers.*.mlp.*_proj",
]  # fmt: skip


@pytest.mark.parametrize("expression", USUAL)
def test_usual_expressions_are_matched(expression: str) -> None:
    (found,) = compiled([expression])
    assert [found.match(name) is None for name in NAMES] == [re.match(expression, name) is None for name in NAMES]


@pytest.mark.parametrize(
    "expression", [r"(\w*\.?)*!", ".*.*.*.*.*", r"(a)\1", "(?i)a", "(", "x" * 600, "(?=.*a.*b).*.*c.*"]
)
def test_what_may_take_long_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        compiled([expression])


def test_sides_are_those_of_the_whole() -> None:
    assert sides(r"a|(b|c)|[|](d\||[^]|]e)|") == ["a", "(b|c)", r"[|](d\||[^]|]e)", ""]


def test_many_count_together() -> None:
    with pytest.raises(ValueError, match="few repetitions"):
        compiled([f"{i}.*x.*y" for i in range(1000)])
