"""Patterns that an adapter's file brings along: regular expressions of a stranger, of which few kinds are matched.

A name is some fifty characters long, and nothing that repeats may stand within what repeats, so no pattern that is
taken here costs more than a few hundred thousand steps for a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pagoda_proto.adapters.files import AdapterError

MAX_CHARS = 512
MAX_REPEATS = 3
MAX_NAMES = 4096  # in a list
_STRANGE = re.compile(r"\(\?(?!:)|\\[0-9]|[)}][*+{]|[*+?}][*+{]")  # lookarounds, backreferences, nested repetitions
_REPEATS = re.compile(r"(?<!\\)[*+{]")

Matches = Callable[[str], bool]


def compiled(field: str, pattern: str, around: str = "{}") -> re.Pattern[str]:
    """`around` is what the pattern stands in.

    Raises:
        AdapterError: it is not a regular expression, or one that might take long.
    """
    if len(pattern) > MAX_CHARS or _STRANGE.search(pattern) or len(_REPEATS.findall(pattern)) > MAX_REPEATS:
        rule = f"patterns of up to {MAX_CHARS} characters are taken, with up to {MAX_REPEATS} repetitions, none nested"
        raise AdapterError(f"{field}: {rule}, and without lookarounds and backreferences, got {pattern[:80]!a}")
    try:
        return re.compile(around.replace("{}", f"(?:{pattern})"))
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{field}: {pattern[:80]!a} is no regular expression: {error}") from error


def by_name(field: str, value: object) -> Matches:
    """A list of names, or of ends of names, or one regular expression for whole names, as PEFT reads them.

    Raises:
        AdapterError: it is neither.
    """
    if isinstance(value, str):
        pattern = compiled(field, value)
        return lambda name: pattern.fullmatch(name) is not None
    if isinstance(value, Sequence) and len(value) <= MAX_NAMES and all(isinstance(one, str) and one for one in value):
        ends = frozenset(value)
        return lambda name: any(name[at:] in ends for at in _starts(name))
    raise AdapterError(f"{field}: must be a list of names or a regular expression, got {value!r:.100}")


def by_pattern(field: str, value: object, check: Callable[[object], bool]) -> Callable[[str], object | None]:
    """What `rank_pattern` or `alpha_pattern` says of a name: the value of the first key that its end matches.

    Raises:
        AdapterError: it is no such table, or `check` denies a value.
    """
    if not isinstance(value, dict) or len(value) > MAX_NAMES or not all(check(one) for one in value.values()):
        raise AdapterError(f"{field}: must be a table of numbers by name, got {value!r:.100}")
    table = [(compiled(field, key, r"(?:.*\.)?{}"), number) for key, number in value.items()]
    return lambda name: next((number for pattern, number in table if pattern.fullmatch(name)), None)


def _starts(name: str) -> list[int]:
    """Where a name and its parts begin."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]
