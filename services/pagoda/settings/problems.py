"""What is wrong with a configuration, apart from what settings there are: whoever only reports it imports no tier."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(Exception):
    """Configuration that cannot be used; one line per problem, each naming the option and where its value came from."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class UnreachableError(ConfigError):
    """Whoever was to be asked cannot be reached now: the same command may do later."""
