"""Of families of formats, the one that an operator names, or that a chat template shows by its marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Family(Protocol):
    """Known by any of its `names`; a chat template that has all of its `marks` asks for it."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def marks(self) -> tuple[str, ...]: ...


F = TypeVar("F", bound=Family)


def fitting(families: Sequence[F], template: str, name: str = "") -> F | None:
    """The first that a chat template asks for; with `name`, the one of this name that fits it best."""
    named = [each for each in families if not name or name in each.names]
    found = [each for each in named if all(mark in template for mark in each.marks)]
    return next(iter(found), named[0] if name and named else None)


def names_of(families: Sequence[Family]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in families for name in each.names))
