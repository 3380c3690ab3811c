"""Errors of a configuration, separate from the settings, so that code that only reports them imports no tier."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(Exception):
    """Invalid configuration; one line per problem, each naming the option and the source of its value."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class UnreachableError(ConfigError):
    """The server cannot be reached now; the same command may succeed later."""
