"""Bounds of numbers that the compiler makes a grammar of, and that this grammar does not keep: they are refused.

Where a whole number, itself excluded, is less than one away from the other bound, it passes; whole numbers beyond 64
bits become the last one within. What holds from above holds from below with all signs turned, so only that is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pagoda_proto.grammars import places

NEAR = "a whole number that is itself excluded needs one or more between it and the other bound"
WIDE = "whole numbers are of 64 bits, and none of these fits"
WORD = 2**63
# Of a bound from below its keyword, that of the excluded one, those from the other side, and the sign of all.
SIDES = (
    ("minimum", "exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
    ("maximum", "exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
)
JOINS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


def leaks(schema: Any) -> Iterator[str]:
    """Each such bound, behind its JSON pointer."""
    joined = _joined(schema)
    for included, excluded, others, sign in SIDES:
        for pointer, part, _ in _parts(schema, {excluded}):
            beside = [part, *joined.get(id(part), ())]
            if _may_be_any_number(part) and _is_near(beside, included, excluded, others, sign):
                yield f"{pointer}: {NEAR}"
        for pointer, part, bound in _parts(schema, {included, excluded}):
            if part.get("type") == "integer" and _is_number(bound) and sign * bound >= WORD + (sign < 0):
                yield f"{pointer}: {WIDE}"


def _is_near(parts: list[Any], included: str, excluded: str, others: tuple[str, ...], sign: int) -> bool:
    """Whether the excluded bound, if it is the one that counts, leaves less than one to the other side."""

    def told(*names: str) -> list[float]:
        return [sign * part[name] for part in parts for name in names if _is_number(part.get(name))]

    bound = max(told(excluded), default=-math.inf)
    other = min(told(*others), default=math.inf)
    return max(told(included), default=bound) <= bound < other < bound + 1 and bound % 1 == 0


def _joined(schema: Any) -> dict[int, list[Any]]:
    """By a part's identity the parts that hold with it: by allOf, anyOf, oneOf or a reference, directly."""
    found: dict[int, list[Any]] = {}
    for _, whole, value in _parts(schema, JOINS):
        named = value if isinstance(value, list) else [_referred(schema, value)]
        group = [whole, *(part for part in named if isinstance(part, dict))]
        for part in group:
            found.setdefault(id(part), []).extend(group)
    return found


def _parts(schema: Any, keywords: set[str] | frozenset[str]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Where one of these stands: its JSON pointer, what it is a keyword of, and its value."""
    for pointer in places(schema, keywords):
        above, _, keyword = pointer.rpartition("/")
        part = _at(schema, above)
        yield pointer, part, part[keyword]


def _referred(schema: Any, name: Any) -> Any:
    try:
        return _at(schema, name[1:]) if isinstance(name, str) and name.startswith("#/") else None
    except (LookupError, ValueError, TypeError):
        return None  # of another document, or of none


def _at(schema: Any, pointer: str) -> Any:
    for name in pointer.split("/")[1:]:
        schema = schema[int(name) if isinstance(schema, list) else name.replace("~1", "/").replace("~0", "~")]
    return schema


def _may_be_any_number(part: dict[str, Any]) -> bool:
    kinds = part.get("type", "number")
    return not {"const", "enum"} & set(part) and (kinds == "number" or (isinstance(kinds, list) and "number" in kinds))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
