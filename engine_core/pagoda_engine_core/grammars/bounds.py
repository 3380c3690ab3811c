"""Finds bounds of numbers in a schema that the compiler accepts but does not enforce; they are refused.

An excluded bound that is a whole number less than one away from the other bound is let through; whole numbers beyond 64
bits become the last one within. Upper and lower bounds behave alike with all signs reversed, so the code is written
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pagoda_proto.grammars import places

NEAR = "a whole number that is itself excluded needs one or more between it and the other bound"
WIDE = "whole numbers are of 64 bits, and none of these fits"
WORD = 2**63
JOINS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


class Side(NamedTuple):
    """One side of a range: keywords of its bound, of its excluded bound and of the other side's bounds; and a sign."""

    included: str
    excluded: str
    others: tuple[str, str]
    sign: int

    def told(self, part: dict[str, Any], *names: str) -> list[float]:
        return [self.sign * part[name] for name in names if _is_number(part.get(name))]


SIDES = (
    Side("minimum", "exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
    Side("maximum", "exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
)


class Bounds(NamedTuple):
    """The strictest bounds of parts that apply together: the highest on this side, the lowest on the other."""

    included: float
    excluded: float
    other: float

    @classmethod
    def of(cls, side: Side, part: dict[str, Any]) -> Bounds:
        return cls(
            max(side.told(part, side.included), default=-math.inf),
            max(side.told(part, side.excluded), default=-math.inf),
            min(side.told(part, *side.others), default=math.inf),
        )

    @classmethod
    def together(cls, all_: Iterable[Bounds]) -> Bounds:
        included, excluded, other = zip(*all_, strict=True)
        return cls(max(included), max(excluded), min(other))

    def near(self) -> bool:
        """Whether the excluded bound is the effective one, whole, and less than one away from the other side."""
        bound = self.excluded
        return self.included <= bound < self.other < bound + 1 and bound % 1 == 0


def leaks(schema: Any) -> Iterator[str]:
    """Each such bound, as its JSON pointer and the reason."""
    groups = _groups(schema)
    for side in SIDES:
        of_groups = [Bounds.together(Bounds.of(side, part) for part in group) for group in groups]
        beside: dict[int, list[Bounds]] = {}  # by a part's identity
        for group, bounds in zip(groups, of_groups, strict=True):
            for part in group:
                beside.setdefault(id(part), []).append(bounds)
        for pointer, part, _ in _parts(schema, {side.excluded}):
            bounds = Bounds.together([Bounds.of(side, part), *beside.get(id(part), ())])
            if _may_be_any_number(part) and bounds.near():
                yield f"{pointer}: {NEAR}"
        for pointer, part, bound in _parts(schema, {side.included, side.excluded}):
            if part.get("type") == "integer" and _is_number(bound) and side.sign * bound >= WORD + (side.sign < 0):
                yield f"{pointer}: {WIDE}"


def _groups(schema: Any) -> list[list[dict[str, Any]]]:
    """The parts that apply together, directly by allOf, anyOf, oneOf or a reference."""
    found = []
    for _, whole, value in _parts(schema, JOINS):
        named = value if isinstance(value, list) else [_referred(schema, value)]
        found.append([whole, *(part for part in named if isinstance(part, dict))])
    return found


def _parts(schema: Any, keywords: set[str] | frozenset[str]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each occurrence of these keywords: its JSON pointer, the schema that has it, and its value."""
    for pointer in places(schema, keywords):
        above, _, keyword = pointer.rpartition("/")
        part = _at(schema, above)
        yield pointer, part, part[keyword]


def _referred(schema: Any, name: Any) -> Any:
    try:
        return _at(schema, name[1:]) if isinstance(name, str) and name.startswith("#/") else None
    except (LookupError, ValueError, TypeError):
        return None  # in another document, or missing


def _at(schema: Any, pointer: str) -> Any:
    for name in pointer.split("/")[1:]:
        schema = schema[int(name) if isinstance(schema, list) else name.replace("~1", "/").replace("~0", "~")]
    return schema


def _may_be_any_number(part: dict[str, Any]) -> bool:
    kinds = part.get("type", "number")
    return not {"const", "enum"} & set(part) and (kinds == "number" or (isinstance(kinds, list) and "number" in kinds))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
