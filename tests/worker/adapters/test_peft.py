"""adapter_config.json is read as PEFT defines it; what is unsupported is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.adapters.files import CONFIG

from pagoda_proto.adapters.files import AdapterError
from pagoda_worker.adapters.peft import REASONS, read_peft

BOTH = ["q_proj", "down_proj"]
Q, DOWN = "model.layers.3.self_attn.q_proj", "model.layers.12.mlp.down_proj"


@pytest.mark.parametrize(
    ("changes", "targeted"),
    [
        ({"target_modules": "all-linear"}, {Q, DOWN}),
        ({"target_modules": ["q_proj"]}, {Q}),
        ({"target_modules": ["self_attn.q_proj", "x.down_proj"]}, {Q}),
        ({"target_modules": ["proj"]}, set()),
        ({"target_modules": [DOWN]}, {DOWN}),
        ({"target_modules": r".*\.(q|k|v)_proj"}, {Q}),
        ({"target_modules": r"model\.layers\.\d+\.mlp\.down_proj"}, {DOWN}),
        ({"target_modules": "q_proj"}, set()),  # a string is one regular expression for whole names
        ({"exclude_modules": ["q_proj"]}, {DOWN}),
        ({"exclude_modules": r".*layers\.12\..*"}, {Q}),
        ({"layers_to_transform": 3, "target_modules": BOTH}, {Q}),
        ({"layers_to_transform": [1, 12], "target_modules": BOTH}, {DOWN}),
        ({"layers_to_transform": [], "target_modules": BOTH}, {Q, DOWN}),
        ({"layers_to_transform": [], "target_modules": BOTH, "layers_pattern": "other"}, {Q, DOWN}),
        ({"layers_to_transform": 3, "target_modules": BOTH, "layers_pattern": "layers"}, {Q}),
        ({"layers_to_transform": [3, 12], "target_modules": BOTH, "layers_pattern": ["h", "model.layers"]}, {Q, DOWN}),
        ({"layers_to_transform": [3, 12], "target_modules": BOTH, "layers_pattern": "(h|l.*s)"}, {Q, DOWN}),
        ({"layers_to_transform": [3, 12], "target_modules": BOTH, "layers_pattern": "other"}, set()),
        ({"layers_to_transform": [3, 12], "target_modules": BOTH, "layers_pattern": ["ayers"]}, set()),
        ({"layers_to_transform": 3, "target_modules": [DOWN, "q_proj", "lm_head"]}, {Q, DOWN, "lm_head"}),
    ],
)
def test_which_modules_have_an_adapter(changes: dict[str, Any], targeted: set[str]) -> None:
    found = read_peft(CONFIG | changes)
    assert {name for name in (Q, DOWN, "lm_head") if found.targets(name)} == targeted


def test_what_peft_writes_without_being_asked_is_known() -> None:
    found = read_peft(CONFIG)
    assert (found.rank(Q), found.scale(Q), found.saved, found.tying) == (8, 2.0, (), False)


@pytest.mark.parametrize("begun", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_initialisations_that_leave_the_models_own_weights_are_served(begun: bool | str) -> None:
    assert read_peft(CONFIG | {"init_lora_weights": begun}).targets(Q)


def test_ranks_and_scales_by_module() -> None:
    patterns = {"rank_pattern": {"down_proj": 4, r"layers\.3\.self_attn\.q_proj": 2}, "alpha_pattern": {"q_proj": 64}}
    plain, rooted = read_peft(CONFIG | patterns), read_peft(CONFIG | patterns | {"use_rslora": True})
    assert [plain.rank(name) for name in (Q, DOWN, "model.layers.1.mlp.up_proj")] == [2, 4, 8]
    assert [plain.scale(name) for name in (Q, DOWN)] == [32.0, 4.0]
    assert rooted.scale(Q) == pytest.approx(64 / math.sqrt(2))


REFUSED: list[dict[str, Any]] = [
    {"peft_type": "LOHA"},
    {"peft_type": None},
    {"task_type": "SEQ_CLS"},
    {"bias": "all"},
    {"bias": "lora_only"},
    *({"init_lora_weights": how} for how in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "anything", 3, [1])),
    *({field: True} for field in REASONS),
    {"something_new": 1},
    {"r": 0}, {"r": "8"}, {"r": True}, {"r": 1.5}, {"lora_alpha": "x"}, {"lora_alpha": 1e300}, {"use_rslora": 1},
    {"rank_pattern": [1]}, {"rank_pattern": {"x": 0}}, {"alpha_pattern": {"x": None}},
    {"target_modules": None}, {"target_modules": []}, {"target_modules": 3}, {"target_modules": [""]},
    {"modules_to_save": "lm_head"}, {"modules_to_save": [1]}, {"ensure_weight_tying": 1},
    {"layers_to_transform": "3", "target_modules": BOTH}, {"layers_to_transform": [True], "target_modules": BOTH},
    *({"layers_to_transform": 3, "target_modules": one} for one in (".*q_proj", "all-linear")),
    {"layers_pattern": "layers"}, {"layers_pattern": ["layers"], "target_modules": BOTH},
    *({"layers_pattern": one, "layers_to_transform": 3, "target_modules": BOTH} for one in (1, [1], [""], "(")),
]  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_what_is_not_served_is_refused_by_its_name(changes: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match=next(iter(changes))):
        read_peft(CONFIG | changes)


LONG = [
    "(a+)+b", "(a*)*", "(a|a)*b", "a**", "(?i)a", "(?P<a>b)(?P=a)", "(?!a*)*b", r"(a)\1", "(", "x" * 600, ".*.*.*.*.*",
    "a{1,9}{1,9}", ".?" * 200, "(.|.)" * 50,
    "(?:.|.|.|.|.|.)" * 9, "[a-z]+" * 5,
]  # fmt: skip


@pytest.mark.parametrize("pattern", LONG)
def test_patterns_that_might_take_long_are_refused(pattern: str) -> None:
    for field in ("target_modules", "exclude_modules"):
        with pytest.raises(AdapterError, match=field):
            read_peft(CONFIG | {field: pattern})
    with pytest.raises(AdapterError, match="layers_pattern"):
        read_peft(CONFIG | {"layers_pattern": pattern, "layers_to_transform": 3, "target_modules": BOTH})
    with pytest.raises(AdapterError, match="alpha_pattern"):
        read_peft(CONFIG | {"alpha_pattern": {pattern: 1}})


def test_many_plain_names_are_no_long_pattern() -> None:
    names = {
        f"model.layers.{layer}.{part}": 4 for layer in range(100) for part in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert read_peft(CONFIG | {"rank_pattern": names}).rank(Q) == 4
    with pytest.raises(AdapterError, match="rank_pattern"):
        read_peft(CONFIG | {"rank_pattern": {f"{index}.*x.*y": 4 for index in range(1000)}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from([*CONFIG, *REASONS, "rank_pattern", "alpha_pattern", "x"]), JSON, max_size=4))
def test_whatever_stands_there_it_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        found = read_peft(CONFIG | changes)
    except AdapterError:
        return
    assert found.rank(Q) > 0
    assert math.isfinite(found.scale(Q))
    assert found.targets(Q) in (True, False)
