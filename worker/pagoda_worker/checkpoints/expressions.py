"""Regular expressions from a model's or an adapter's file are untrusted: only a few kinds are accepted.

At worst, matching tries every way to read an expression: where each repetition ends in a name, which side of each
alternative, with and without each optional part. Repetitions must not be nested, so their ends are in order, the rest
is independent, and the number of ways is known before anything is matched. A lookaround is tried as often as what
stands in its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MAX_CHARS = 512
NAME_CHARS = 64  # about
MAX_WAYS = 1 << 20  # to read all expressions of a field
# Refused: groups other than plain, named and lookaround ones, backreferences, nested repetitions.
_STRANGE = re.compile(r"\(\?(?!:|<?[=!]|P<)|\\[0-9]|[)}][*+{]|[*+?}][*+{]")

_MARKS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)  # escapes and classes are consumed whole


def sides(expression: str) -> list[str]:
    """Its top-level alternatives, which are tried one after the other."""
    depth, begin, found = 0, 0, []
    for mark in _MARKS.finditer(expression):
        depth += (mark.group() == "(") - (mark.group() == ")")
        if mark.group() == "|" and depth == 0:
            found.append(expression[begin : mark.start()])
            begin = mark.end()
    return [*found, expression[begin:]]


def ways(expression: str) -> float:
    """An upper bound on the ways to read it, if it is a single side."""
    plain = expression.replace("(?:", "(")
    repeats, sides, places = sum(map(plain.count, "*+{")), plain.count("|"), plain.count("(") + 1
    return math.comb(NAME_CHARS + repeats, repeats) * 2.0 ** plain.count("?") * (1 + sides / places) ** places


def compiled(expressions: Sequence[str], around: str = "{}") -> list[re.Pattern[str]]:
    """Compile each expression, placed within `around`.

    Raises:
        ValueError: one is not a regular expression, or together they might take long.
    """
    strange = [one for one in expressions if len(one) > MAX_CHARS or _STRANGE.search(one)]
    if strange or sum(ways(around.replace("{}", side)) for one in expressions for side in sides(one)) > MAX_WAYS:
        worst = (strange or sorted(expressions, key=ways)[-1:])[0]
        rule = f"patterns may have up to {MAX_CHARS} characters and few repetitions, alternatives and options"
        raise ValueError(f"{rule}, without nesting or backreferences, got {worst[:80]!a}")
    try:
        return [re.compile(around.replace("{}", f"(?:{one})")) for one in expressions]
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"a pattern is not a regular expression: {error}") from error
