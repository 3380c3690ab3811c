"""Patterns that an adapter's file brings along: regular expressions of a stranger, of which few kinds are matched.

Matching tries, at worst, every way in which a pattern may be read: where each repetition ends in a name, which side of
each alternative, with and without what is optional. Nothing that repeats may stand within what repeats, so these are
independent, and their number is known before anything is matched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pagoda_proto.adapters.files import AdapterError

MAX_CHARS = 512
MAX_NAMES = 4096  # in a list
NAME_CHARS = 64  # about
MAX_WAYS = 1 << 20  # to read all patterns of a field
_STRANGE = re.compile(r"\(\?(?!:)|\\[0-9]|[)}][*+{]|[*+?}][*+{]")  # lookarounds, backreferences, nested repetitions

Matches = Callable[[str], bool]


def ways(pattern: str) -> float:
    """How many ways there are to read it, at most."""
    plain = pattern.replace("(?:", "(")
    repeats, sides, places = sum(map(plain.count, "*+{")), plain.count("|"), plain.count("(") + 1
    return float(NAME_CHARS) ** repeats * 2.0 ** plain.count("?") * (1 + sides / places) ** places


def compiled(field: str, patterns: Sequence[str], around: str = "{}") -> list[re.Pattern[str]]:
    """`around` is what each pattern stands in.

    Raises:
        AdapterError: one is not a regular expression, or they might take long together.
    """
    strange = [one for one in patterns if len(one) > MAX_CHARS or _STRANGE.search(one)]
    try:
        if strange or sum(ways(around.replace("{}", one)) for one in patterns) > MAX_WAYS:
            worst = (strange or sorted(patterns, key=ways)[-1:])[0]
            rule = f"patterns have up to {MAX_CHARS} characters, few repetitions, alternatives and options, none nested"
            raise AdapterError(f"{field}: {rule}, no lookarounds and no backreferences, got {worst[:80]!a}")
        return [re.compile(around.replace("{}", f"(?:{one})")) for one in patterns]
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{field}: a pattern is no regular expression: {error}") from error


def by_name(field: str, value: object) -> Matches:
    """A list of names, or of ends of names, or one regular expression for whole names, as PEFT reads them.

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


def by_pattern(field: str, value: object, check: Callable[[object], bool]) -> Callable[[str], object | None]:
    """What `rank_pattern` or `alpha_pattern` says of a name: the value of the first key that its end matches.

    Raises:
        AdapterError: it is no such table, or `check` denies a value.
    """
    if not isinstance(value, dict) or len(value) > MAX_NAMES or not all(check(one) for one in value.values()):
        raise AdapterError(f"{field}: must be a table of numbers by name, got {value!r:.100}")
    table = list(zip(compiled(field, list(value), r"(?:.*\.)?{}"), value.values(), strict=True))
    return lambda name: next((number for pattern, number in table if pattern.fullmatch(name)), None)


def _starts(name: str) -> list[int]:
    """Where a name and its parts begin."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]
