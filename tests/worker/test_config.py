"""Every number that an operator may get wrong is refused by name, all of them at once."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from pagoda_worker.config import AUTO_SWAP_SPACE, WorkerConfig

NEEDED = {  # without which the number has no effect
    "max_drafts": {"speculation": "suffix"}, "draft_vocab_size": {"speculation": "draft-model", "draft_model": "m"},
}  # fmt: skip
NUMBERS = sorted(field.name for field in fields(WorkerConfig) if type(field.default) in (int, float))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -16, 2**40, "8", True, None])
def test_a_number_that_is_none_or_absurd_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be [^;]*, got {value!r}$"):
        WorkerConfig(**NEEDED.get(name, {}) | {name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_rows", "max_tokens_per_step", "gpu_memory_utilization"])
def test_zero_is_refused_where_it_has_no_meaning(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be between .*, got 0"):
        WorkerConfig(**{name: 0})  # type: ignore[arg-type]


def test_a_fraction_is_no_whole_number() -> None:
    with pytest.raises(ValueError, match=r"max_rows must be a whole number, got 2\.5"):
        WorkerConfig(max_rows=2.5)  # type: ignore[arg-type]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="max_rows") as raised:
        WorkerConfig(dtype="float8", max_rows=0, block_size=17, kv_cache_gib=-1.0, swap_space_gib=-2.0, draft_model="x")
    told = str(raised.value).split("; ")
    names = ("dtype", "max_rows", "block_size", "kv_cache_gib", "swap_space_gib", "draft_model")
    assert sorted(problem.split()[0] for problem in told) == sorted(names)


def test_swap_space_may_be_left_to_us() -> None:
    assert WorkerConfig(swap_space_gib=-1).swap_space_gib == AUTO_SWAP_SPACE


def test_one_file_cannot_tell_liveness_and_readiness() -> None:
    with pytest.raises(ValueError, match="ready_file must not be alive_file"):
        WorkerConfig(alive_file="/tmp/sign", ready_file="/tmp/sign")
    assert not WorkerConfig().ready_file
