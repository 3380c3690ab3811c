"""llguidance names keywords that it does not know, and not where they stand; a client looks for a place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pagoda_proto.grammars import subschemas

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
        schema = json.loads(grammar)["grammars"][0]["json_schema"]
    except (ValueError, LookupError, TypeError):
        return problem
    keyword = next(filter(None, found.groups()))
    value = problem[found.end() :] if keyword == "format" else None
    pointer = next(pointers(schema, keyword, value), "")
    return f"{pointer}: {problem}" if pointer else problem


def pointers(schema: Any, keyword: str, value: Any = None, at: str = "") -> Iterator[str]:
    """Where `keyword` stands as a keyword, with this value if there is one, in the order of the schema."""
    if isinstance(schema, dict) and keyword in schema and value in (None, schema[keyword]):
        yield f"{at}/{_escaped(keyword)}"
    for path, inner in subschemas(schema):
        yield from pointers(inner, keyword, value, at + "".join(f"/{_escaped(str(name))}" for name in path))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
