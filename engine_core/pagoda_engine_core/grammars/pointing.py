"""Where a schema cannot be held to: llguidance names keywords that it does not know, and not where they stand; of a few
numbers it does not say that its grammar lets others through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pagoda_proto.grammars import parts_of, places

_UNKNOWN = re.compile(
    r'Unimplemented keys: \["([^"]+)"|^(oneOf) constraints are not supported|^Unknown (format): '
    r"|^min/(maxProperties) only"
)
BOUNDS = frozenset({"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"})
WORD = 2**63
NOTHING_FITS = "NoExtensionBias"  # in its words


def located(problem: str, grammar: str) -> str:
    """The problem, with the JSON pointer of the keyword that it is about before it, if it is about one."""
    if problem == NOTHING_FITS:
        return f"the compiler finds nothing that fits it, or no way to begin ({NOTHING_FITS})"
    found = _UNKNOWN.search(problem)
    if found is None:
        return problem
    keyword = next(filter(None, found.groups()))
    value = problem[found.end() :] if keyword == "format" else None
    pointer = next((place for schema in _schemas(grammar) for place in places(schema, {keyword}, value)), "")
    return f"{pointer}: {problem}" if pointer else problem


def leaking(grammar: str) -> str:
    """Which bound its grammar does not keep, though it is made: between zero, itself excluded, and less than one, zero
    passes; whole numbers beyond 64 bits become the last one within."""
    return next((problem for schema in _schemas(grammar) for problem in _leaks(schema)), "")


def _leaks(schema: Any) -> Iterator[str]:
    for pointer in places(schema, BOUNDS):
        above, _, keyword = pointer.rpartition("/")
        one = _at(schema, above)
        bound, whole = one[keyword], one.get("type") == "integer"
        upper = (one[name] for name in ("maximum", "exclusiveMaximum") if _is_number(one.get(name)))
        lower = (one[name] for name in ("minimum", "exclusiveMinimum") if _is_number(one.get(name)))
        near = keyword == "exclusiveMinimum" and min(upper, default=1) < 1
        near |= keyword == "exclusiveMaximum" and max(lower, default=-1) > -1
        if bound == 0 and near and not whole and _is_number(bound):
            yield f"{pointer}: a bound of 0 that is not itself allowed needs 1 or more between it and the other bound"
        if whole and _is_number(bound) and (bound >= WORD if keyword.lower().endswith("minimum") else bound < -WORD):
            yield f"{pointer}: whole numbers are of 64 bits, and none of these fits"


def _schemas(grammar: str) -> list[Any]:
    try:
        return [part["json_schema"] for part in parts_of(grammar) if "json_schema" in part]
    except (ValueError, LookupError, TypeError):
        return []


def _at(schema: Any, pointer: str) -> Any:
    for name in pointer.split("/")[1:]:
        schema = schema[int(name) if isinstance(schema, list) else name.replace("~1", "/").replace("~0", "~")]
    return schema


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
