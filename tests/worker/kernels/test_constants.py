"""Constants compiled into the kernels equal the ones that Python relies on."""

from __future__ import annotations

import re

import pytest

from pagoda_worker.kernels.cpu import experts, load, low_rank, native
from pagoda_worker.kernels.cpu.build import SOURCE
from pagoda_worker.kernels.ops import ACTIVATIONS, CLAMP, CLAMPED, CLAMPED_GAIN
from pagoda_worker.models.families import moe

SAME = [
    ("program.h", "MAX_DIM", load.MAX_HEAD_DIM),
    ("program.h", "LOW_HEAD", low_rank.HEAD),
    ("experts.h", "MOST_EXPERTS", experts.MOST_EXPERTS),
    ("experts.h", "MOST_CHOSEN", experts.MOST_CHOSEN),
    ("attention_cells.h", "SPLIT", native.ATTENTION_SPLIT),
]


@pytest.mark.parametrize(("file", "name", "value"), SAME, ids=[name for _, name, _ in SAME])
def test_a_constant_is_the_same_on_both_sides(file: str, name: str, value: int) -> None:
    found = re.findall(rf"constexpr int (?:\w+ = \d+, )*{name} = (\d+)[,;]", (SOURCE / file).read_text())
    assert found == [str(value)]


def test_activations_are_the_same_on_both_sides() -> None:
    source = (SOURCE / "program.h").read_text()
    [names] = re.findall(r"enum Activation : int32_t \{ NO_ACTIVATION, (.*) \};", source)
    assert names.lower().split(", ") == [*ACTIVATIONS, CLAMPED]
    numbers = re.findall(r"CLAMP = ([0-9.]+)f, CLAMPED_GAIN = ([0-9.]+)f;", source)
    assert [tuple(map(float, each)) for each in numbers] == [(CLAMP, CLAMPED_GAIN)]


def test_what_a_model_may_have_the_kernels_take() -> None:
    assert moe.MOST_EXPERTS <= experts.MOST_EXPERTS
