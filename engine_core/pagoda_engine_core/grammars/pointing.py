"""llguidance names keywords that it does not know, and not where they stand; a client looks for a place."""

from __future__ import annotations

import re

from pagoda_proto.grammars import parts_of, places

_UNKNOWN = re.compile(
    r'Unimplemented keys: \["([^"]+)"|^(oneOf) constraints are not supported|^Unknown (format): '
    r"|^min/(maxProperties) only"
)


def located(problem: str, grammar: str) -> str:
    """The problem, with the JSON pointer of the keyword that it is about before it, if it is about one."""
    found = _UNKNOWN.search(problem)
    if found is None:
        return problem
    try:
        schemas = [part["json_schema"] for part in parts_of(grammar) if "json_schema" in part]
    except (ValueError, LookupError, TypeError):
        return problem
    keyword = next(filter(None, found.groups()))
    value = problem[found.end() :] if keyword == "format" else None
    pointer = next((place for schema in schemas for place in places(schema, {keyword}, value)), "")
    return f"{pointer}: {problem}" if pointer else problem
