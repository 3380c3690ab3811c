"""Small things that several shapes read."""

from __future__ import annotations

import json
import re

from pagoda_gateway.text.source import NotACall, Reading, Source
from pagoda_gateway.text.tool_formats.format import MAX_NAME_CHARS

_NAME_CHAR = re.compile(r"[A-Za-z0-9_.\-]")


def word(source: Source) -> Reading[str]:
    """A name, as far as it goes. Raises NotACall."""
    name = ""
    while len(name) < MAX_NAME_CHARS and _NAME_CHAR.match((yield from source.peek())):
        name += yield from source.next()
    if not name:
        raise NotACall("a name is missing")
    return name


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def inside(text: str) -> str:
    """A piece of a string as it stands inside JSON's quotes."""
    return dumped(text)[1:-1]


def parsed(text: str) -> object:
    """JSON in the strict sense. Raises ValueError."""

    def refuse(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
