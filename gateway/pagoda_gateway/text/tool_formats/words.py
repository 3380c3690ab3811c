"""Small helpers for JSON, shared by several shapes."""

from __future__ import annotations

import json


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def inside(text: str) -> str:
    """Escape a piece of a string for use inside JSON's quotes."""
    return dumped(text)[1:-1]


def parsed(text: str) -> object:
    """Parse strict JSON. Raises ValueError."""

    def refuse(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
