"""Where a schema cannot be held to: llguidance names keywords that it does not know, and not where they stand; of a few
numbers it does not say that its grammar lets others through."""

from __future__ import annotations

import contextlib
import math
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
    """Which bound its grammar does not keep, though it is made: where a whole number, itself excluded, is less than one
    away from the other bound, it passes; whole numbers beyond 64 bits become the last one within."""
    return next((problem for schema in _schemas(grammar) for problem in _leaks(schema)), "")


def _leaks(schema: Any) -> Iterator[str]:
    for pointer in places(schema, {"exclusiveMinimum", "exclusiveMaximum"}):
        above, _, keyword = pointer.rpartition("/")
        one = _at(schema, above)
        if not {"const", "enum"} & set(one) and _may_be(one, "number") and _is_near(keyword, _bounds(schema, one)):
            yield f"{pointer}: a whole number that is itself excluded needs one or more between it and the other bound"
    for pointer in places(schema, BOUNDS):
        above, _, keyword = pointer.rpartition("/")
        one = _at(schema, above)
        bound = one[keyword] if _is_number(one[keyword]) and one.get("type") == "integer" else 0
        if bound >= WORD if keyword.lower().endswith("minimum") else bound < -WORD:
            yield f"{pointer}: whole numbers are of 64 bits, and none of these fits"


def _is_near(keyword: str, bounds: dict[str, list[float]]) -> bool:
    """Whether this bound, as the one that counts, leaves less than one to the other."""
    if keyword == "exclusiveMinimum":
        bound, inside = max(bounds[keyword], default=0.5), max(bounds["minimum"], default=-math.inf)
        other = min(bounds["maximum"] + bounds["exclusiveMaximum"], default=math.inf)
        return bound == int(bound) and inside <= bound < other < bound + 1
    bound, inside = min(bounds[keyword], default=0.5), min(bounds["maximum"], default=math.inf)
    other = max(bounds["minimum"] + bounds["exclusiveMinimum"], default=-math.inf)
    return bound == int(bound) and bound - 1 < other < bound <= inside


def _bounds(schema: Any, one: Any) -> dict[str, list[float]]:
    """Those that hold with this part of the schema: its own, and those of what allOf and the like join it with."""
    found: dict[str, list[float]] = {name: [] for name in BOUNDS}
    for part in (one, *_beside(schema, one)):
        for name, values in found.items():
            if _is_number(value := part.get(name)) and math.isfinite(value):
                values.append(value)
    return found


def _beside(schema: Any, one: Any) -> list[Any]:
    """Parts that are joined with this one by allOf, anyOf, oneOf or a reference, directly."""
    joined = []
    for pointer in places(schema, {"allOf", "anyOf", "oneOf", "$ref"}):
        above, _, keyword = pointer.rpartition("/")
        whole = _at(schema, above)
        parts = [_referred(schema, whole[keyword])] if keyword == "$ref" else whole[keyword]
        group = [whole, *(part for part in parts if isinstance(part, dict))] if isinstance(parts, list) else [whole]
        if any(part is one for part in group):
            joined += [part for part in group if part is not one]
    return joined


def _referred(schema: Any, name: Any) -> Any:
    with contextlib.suppress(LookupError, ValueError, TypeError):
        return _at(schema, name.removeprefix("#")) if isinstance(name, str) and name.startswith("#/") else None
    return None


def _may_be(one: Any, kind: str) -> bool:
    kinds = one.get("type", kind)
    return kind == kinds or (isinstance(kinds, list) and kind in kinds)


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
