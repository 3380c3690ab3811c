"""Chooses the format of a model's calls: the operator's choice, otherwise the one its chat template shows. Reasoning
formats are chosen in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from pagoda_gateway.text.tool_formats.families import TOOL_FORMATS
from pagoda_gateway.text.tool_formats.format import ToolFormat


class Row(Protocol):
    """A format, known by any of its `names`; a chat template that contains all of its `marks` uses it."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def marks(self) -> tuple[str, ...]: ...


R = TypeVar("R", bound=Row)


def fitting(rows: Sequence[R], template: str, name: str = "") -> R | None:
    """The first format whose marks a chat template has; with `name`, only of that name, and its first if none match."""
    named = [each for each in rows if not name or name in each.names]
    found = [each for each in named if all(mark in template for mark in each.marks)]
    return next(iter(found), named[0] if name and named else None)


def names_of(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in rows for name in each.names))


TOOL_FORMAT_NAMES = names_of(TOOL_FORMATS)


def recognised(template: str, name: str = "") -> ToolFormat | None:
    return fitting(TOOL_FORMATS, template, name)
