"""An option's rule is declared with its field and enforced for every config that is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from pagoda_proto.errors import Problem
from pagoda_proto.options import MOST_WHOLE, BadOptions, check, option


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = option(3, "a size")
    wait_s: float = option(1.0, "a wait", least=0.5)
    kind: str = option("", "a kind", words=("", "a", "b"))
    loud: bool = option(False, "a switch")
    name: str = option("", "any text")

    def __post_init__(self) -> None:
        check(self, [Problem("name", "name must not be x")] if self.name == "x" else [])


def test_what_keeps_the_rules_is_taken() -> None:
    assert Config(size=MOST_WHOLE, wait_s=0.5, kind="b", name="y", loud=True).size == MOST_WHOLE
    Config()


@pytest.mark.parametrize("size", [-1, MOST_WHOLE + 1, 10**100])
def test_a_number_of_which_nothing_is_said_still_has_bounds(size: int) -> None:
    with pytest.raises(BadOptions, match=f"^size must be between 0 and {MOST_WHOLE}, got {size}$"):
        Config(size=size)


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -math.inf, 0.4, 1e7])
def test_a_wait_is_a_finite_number(wait_s: float) -> None:
    with pytest.raises(BadOptions, match=f"^wait_s must be between 0.5 and 1000000, got {wait_s}$"):
        Config(wait_s=wait_s)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("size", True, "a whole number"),
        ("size", "8", "a whole number"),
        ("size", 2.5, "a whole number"),
        ("size", None, "a whole number"),
        ("wait_s", "1", "a number"),
        ("wait_s", True, "a number"),
        ("loud", 1, "true or false"),
        ("name", b"x", "text"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, kind: str) -> None:
    with pytest.raises(BadOptions) as caught:
        Config(**{name: value})
    assert str(caught.value) == f"{name} must be {kind}, got {value!r}"


def test_a_whole_number_is_a_number() -> None:
    assert Config(wait_s=2).wait_s == 2


def test_all_problems_are_told_each_with_its_option() -> None:
    with pytest.raises(BadOptions) as caught:
        Config(size=-1, kind="c", name="x")
    assert [problem.param for problem in caught.value.problems] == ["size", "kind", "name"]
    assert str(caught.value).endswith("kind must be empty or one of a, b, got 'c'; name must not be x")
