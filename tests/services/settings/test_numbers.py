"""Every number that a command takes is checked."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from pagoda.cli import COMMANDS, parser_of
from pagoda.settings.numbers import number, seed, whole


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("0", 0), ("65535", 65535)])
def test_a_whole_number_within_its_bounds_is_taken(text: str, value: int) -> None:
    assert whole(0, 65535)(text) == value


@pytest.mark.parametrize(
    ("text", "rule"),
    [("-1", "between 0 and 9"), ("10", "between 0 and 9"), ("9" * 99, "between 0 and 9"), ("1.5", "a whole number"),
     ("", "a whole number"), ("nan", "a whole number"), ("x" * 10**4, "a whole number")],
)  # fmt: skip
def test_any_other_is_refused_by_its_rule(text: str, rule: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be {rule}, got ") as caught:
        whole(0, 9)(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "-0.1", "11"])
def test_a_number_is_finite_and_within_its_bounds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be (between 0 and 10|a number), got "):
        number(0, 10)(text)


def test_a_seed_has_64_bits() -> None:
    assert seed()("-5") == -5
    with pytest.raises(argparse.ArgumentTypeError):
        seed()(str(2**64))


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from actions(sub)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_no_argument_of_any_command_takes_any_number(command: str) -> None:
    assert [action.dest for action in actions(parser_of(command)) if action.type in (int, float)] == []
