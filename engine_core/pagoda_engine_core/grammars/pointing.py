"""llguidance names keywords that it does not know, and not where they stand; a client looks for a place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_UNKNOWN = re.compile(r'Unimplemented keys: \["([^"]+)"|^(oneOf) constraints are not supported')
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # names to schemas
PLAIN = frozenset({"enum", "const", "default", "examples", "x-guidance"})  # values that are no schemas


def located(problem: str, grammar: str) -> str:
    """The problem, with the JSON pointer of the keyword that it is about before it, if it is about one."""
    found = _UNKNOWN.search(problem)
    if found is None:
        return problem
    try:
        schema = json.loads(grammar)["grammars"][0]["json_schema"]
    except (ValueError, LookupError, TypeError):
        return problem
    pointer = next(pointers(schema, found[1] or found[2]), "")
    return f"{pointer}: {problem}" if pointer else problem


def pointers(schema: Any, keyword: str, at: str = "") -> Iterator[str]:
    """Where `keyword` stands as a keyword, in the order of the schema."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from pointers(item, keyword, f"{at}/{i}")
    elif isinstance(schema, dict):
        if keyword in schema:
            yield f"{at}/{_escaped(keyword)}"
        for name, value in schema.items():
            below = f"{at}/{_escaped(name)}"
            if name in NAMED and isinstance(value, dict):
                for inner, item in value.items():
                    yield from pointers(item, keyword, f"{below}/{_escaped(inner)}")
            elif name not in PLAIN:
                yield from pointers(value, keyword, below)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
