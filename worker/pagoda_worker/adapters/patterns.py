"""Which linear layers an adapter's file targets, and with which numbers: by lists, and by patterns, of which few kinds
are supported (`expressions`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeGuard, TypeVar

from pagoda_proto.adapters.files import AdapterError
from pagoda_worker.checkpoints import expressions

MAX_NAMES = 4096  # in a list

T = TypeVar("T")
Matches = Callable[[str], bool]


def compiled(field: str, patterns: Sequence[str], around: str = "{}") -> list[re.Pattern[str]]:
    """See `expressions.compiled`. Raises AdapterError, naming the field."""
    try:
        return expressions.compiled(patterns, around)
    except ValueError as error:
        raise AdapterError(f"{field}: {error}") from error


def by_name(field: str, value: object) -> Matches:
    """A list of names or name suffixes, or one regular expression for whole names, as PEFT reads them.

    Raises:
        AdapterError: it is neither.
    """
    if isinstance(value, str):
        (pattern,) = compiled(field, [value])
        return lambda name: pattern.fullmatch(name) is not None
    if isinstance(value, Sequence) and len(value) <= MAX_NAMES and all(isinstance(one, str) and one for one in value):
        ends = frozenset(value)
        return lambda name: any(name[at:] in ends for at in _starts(name))
    raise AdapterError(f"{field}: must be a list of names or a regular expression, got {value!r:.100}")


def by_pattern(field: str, value: object, check: Callable[[object], TypeGuard[T]]) -> Callable[[str], T | None]:
    """Look up a name in `rank_pattern` or `alpha_pattern`: the value of the first key that matches its end.

    Raises:
        AdapterError: it is no such table, or `check` rejects a value.
    """
    if not isinstance(value, dict) or len(value) > MAX_NAMES or not all(check(one) for one in value.values()):
        raise AdapterError(f"{field}: must be a table of numbers by name, got {value!r:.100}")
    table = list(zip(compiled(field, list(value), r"(?:.*\.)?{}"), value.values(), strict=True))
    return lambda name: next((number for pattern, number in table if pattern.fullmatch(name)), None)


def _starts(name: str) -> list[int]:
    """Where the name and each of its dotted parts begin."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]
