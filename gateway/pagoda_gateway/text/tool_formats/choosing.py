"""Which format a model's calls have: what its operator says, else what its chat template shows."""

from __future__ import annotations

from pagoda_gateway.text.recognising import fitting, names_of
from pagoda_gateway.text.tool_formats.families import TOOL_FORMATS
from pagoda_gateway.text.tool_formats.format import ToolFormat

TOOL_FORMAT_NAMES = names_of(TOOL_FORMATS)


def recognised(template: str, name: str = "") -> ToolFormat | None:
    return fitting(TOOL_FORMATS, template, name)
