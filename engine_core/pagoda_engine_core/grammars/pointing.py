"""Where a schema cannot be held to: llguidance names keywords that it does not know, and not where they stand; of a few
numbers it does not say that its grammar lets others through."""

from __future__ import annotations

import re
from typing import Any

from pagoda_engine_core.grammars.bounds import leaks
from pagoda_proto.grammars import parts_of, places

_UNKNOWN = re.compile(
    r'Unimplemented keys: \["([^"]+)"|^(oneOf) constraints are not supported|^Unknown (format): '
    r"|^min/(maxProperties) only"
)
NOTHING_FITS = "NoExtensionBias"  # in its words


def located(problem: str, grammar: str) -> str:
    """The problem, with the JSON pointer of the keyword that it is about before it, if it is about one."""
    if problem.startswith(NOTHING_FITS):
        return f"the compiler finds nothing that fits it, or no way to begin ({NOTHING_FITS})"
    found = _UNKNOWN.search(problem)
    if found is None:
        return problem
    keyword = next(filter(None, found.groups()))
    value = problem[found.end() :] if keyword == "format" else None
    pointer = next((place for schema in _schemas(grammar) for place in places(schema, {keyword}, value)), "")
    return f"{pointer}: {problem}" if pointer else problem


def leaking(grammar: str) -> str:
    """Which bound of a schema its grammar does not keep, though it is made: see `bounds`."""
    return next((problem for schema in _schemas(grammar) for problem in leaks(schema)), "")


def _schemas(grammar: str) -> list[Any]:
    try:
        return [part["json_schema"] for part in parts_of(grammar) if "json_schema" in part]
    except (ValueError, LookupError, TypeError):
        return []
