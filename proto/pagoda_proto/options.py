"""An option is one field of a frozen config, which defines its default, one line of help and its rule.

Flags, environment, YAML, the JSON schema, help and validation all derive from the field. Every number has a minimum and
a maximum, so nonsensical values are rejected where they are given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pagoda_proto.errors import Problem

MOST_WHOLE = 2**31 - 1
MOST_NUMBER = 1e6
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Rule(NamedTuple):
    """What an option's value must be: a number from `least` to `most`, or one of `words`; any text without either.
    `unset` is a number outside that range which means "not set".

    `required`: a process started on its own needs it. `secret`: it is never shown, and is passed to a process in its
    environment, which only its owner can read, never by a flag. `several`: a flag may have several values and be
    repeated, and a settings file may have a list; the values are joined by commas. `otherwise` is added to the error
    about a value that is not one of `words`.
    """

    least: float | None = None
    most: float | None = None
    unset: float | None = None
    words: tuple[str, ...] = ()
    required: bool = False
    secret: bool = False
    several: bool = False
    otherwise: str = ""

    def problem(self, value: Any) -> str:
        """What is wrong with the value; "" if nothing is."""
        if self.words and value not in self.words:
            empty = "empty or " if "" in self.words else ""
            otherwise = f": {self.otherwise}" if self.otherwise else ""
            return f"must be {empty}one of {', '.join(filter(None, self.words))}, got {value!r:.100}{otherwise}"
        if self.least is None or self.most is None or value == self.unset:
            return ""
        if not self.least <= value <= self.most:  # fails for nan
            unset = "" if self.unset is None else f"{_spelt(self.unset)} or "
            return f"must be {unset}between {_spelt(self.least)} and {_spelt(self.most)}, got {value!s:.200}"
        return ""


class BadOptions(ValueError):
    """All problems of a config at once; each `param` is the option, and each message a sentence that names it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.message for problem in self.problems))


def option(default: Any, help: str, **rule: Any) -> Any:
    """A dataclass field with a default, one line of help and the parts of a `Rule`.

    By default a number is not negative and at most 2**31 - 1, or one million if it may be fractional.
    """
    if not isinstance(default, bool | str):
        rule = {"least": 0, "most": MOST_NUMBER if isinstance(default, float) else MOST_WHOLE} | rule
    return dataclasses.field(default=default, metadata={"help": help, "rule": Rule(**rule)})


def check(config: Any, further: Iterable[Problem] = ()) -> None:
    """Check a config against the types and rules of its fields.

    `further` yields problems that no single rule covers; it is consumed only if every value has its type.

    Raises:
        BadOptions: there are problems.
    """
    problems = list(_wrong_types(config)) or [*_broken_rules(config), *further]
    if problems:
        raise BadOptions(problems)


def _wrong_types(config: Any) -> Iterator[Problem]:
    for field in dataclasses.fields(config):
        value, wanted = getattr(config, field.name), type(field.default)
        if type(value) is not wanted and (wanted is not float or type(value) is not int):
            got = "" if field.metadata["rule"].secret else f", got {value!r:.100}"
            yield Problem(field.name, f"{field.name} must be {TYPE_NAMES[wanted]}{got}")


def _broken_rules(config: Any) -> Iterator[Problem]:
    for field in dataclasses.fields(config):
        rule: Rule = field.metadata["rule"]
        wrong = rule.problem(getattr(config, field.name))
        if wrong:
            yield Problem(field.name, f"{field.name} {wrong}")


def _spelt(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"
