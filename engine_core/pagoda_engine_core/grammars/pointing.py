"""Locates what a grammar cannot enforce: llguidance names unknown keywords without their place, and does not report
that it leaves some bounds of numbers unenforced."""

from __future__ import annotations

import re
from typing import Any

from pagoda_engine_core.grammars.bounds import leaks
from pagoda_proto.grammars import parts_of, places

_UNKNOWN = re.compile(
    r'Unimplemented keys: \["([^"]+)"|^(oneOf) constraints are not supported|^Unknown (format): '
    r"|^min/(maxProperties) only"
)
NOTHING_FITS = "NoExtensionBias"  # llguidance's wording


def located(problem: str, grammar: str) -> str:
    """The problem, preceded by the JSON pointer of the keyword that it is about, if any."""
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
    """The first bound of a schema that its grammar does not enforce, though it compiles; see `bounds`."""
    return next((problem for schema in _schemas(grammar) for problem in leaks(schema)), "")


def _schemas(grammar: str) -> list[Any]:
    try:
        return [part["json_schema"] for part in parts_of(grammar) if "json_schema" in part]
    except (ValueError, LookupError, TypeError):
        return []
