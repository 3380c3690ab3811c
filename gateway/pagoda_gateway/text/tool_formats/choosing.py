"""Which format a model's calls have: what its operator says, else what its chat template shows."""

from __future__ import annotations

from pagoda_gateway.text.tool_formats.families import TOOL_FORMATS
from pagoda_gateway.text.tool_formats.format import ToolFormat

TOOL_FORMAT_NAMES = tuple(dict.fromkeys(each.name for each in TOOL_FORMATS))


def recognised(template: str, name: str = "") -> ToolFormat | None:
    """The format that a chat template asks for; with `name`, the one of this name that fits it best."""
    named = [each for each in TOOL_FORMATS if name in ("", each.name)]
    fitting = [each for each in named if all(mark in template for mark in each.marks)]
    return next(iter(fitting), named[0] if name else None)
