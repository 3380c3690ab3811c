"""The structure that output must have, as one string on every wire: a grammar in llguidance's format.

A schema, a regular expression or a list of words is converted to such a string here, once; only the checker and the
workers, which compile it, read it. Both compile under `LIMITS`, which count work, not time, so that a grammar is
refused, or a row fails, at the same point wherever and however often it is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypedDict


class Limits(TypedDict):
    """See llguidance's LLParserLimits."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_items_in_row: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


LIMITS: Limits = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,  # for one mask: about 14 ms
    "step_max_items": 50_000,
    "max_items_in_row": 500,  # the cost of an ambiguous grammar grows with its square
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 250_000,
    "verbose_errors": False,  # they would quote the client's grammar
}
MAX_REGEX_CHARS = 4096
MAX_CHOICES = 1024

# Keywords of JSON schemas that llguidance does not compile; tests check this list against it.
UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames",
    "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)  # names to schemas
PLAIN_VALUES = frozenset({"enum", "const", "default", "examples", "x-guidance"})  # values that are not schemas
FORMATS = frozenset({
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""The formats that JSON Schema defines. It treats others as annotations, which need not be enforced."""
WHITE_SPACE = r" |\r?\n[ \t]{0,64}"
_TO_ESCAPE = re.compile(r"\\.|[/\n]", re.DOTALL)


def json_schema(schema: dict[str, Any]) -> str:
    """JSON that the schema admits, with properties in the schema's order.

    Between tokens there may be a space, or a line break and indentation, or nothing, because a model that may write
    white space freely may never stop. A schema with llguidance's `x-guidance` makes its own rules.
    """
    return _written([schema_part(schema)])


def schema_part(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, as a part of a composed grammar."""
    return {"json_schema": written(schema)}


def written(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with a limit on white space and without formats that are only annotations."""
    told: dict[str, Any] = _without_notes(schema)
    return {"x-guidance": {"whitespace_pattern": WHITE_SPACE}} | told


def _without_notes(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_notes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    told = {}
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            told[name] = {inner: _without_notes(item) for inner, item in value.items()}
        elif name in PLAIN_VALUES:
            told[name] = value
        elif name != "format" or not isinstance(value, str) or value in FORMATS:
            told[name] = _without_notes(value)
    return told


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Text that the whole pattern matches."""
    return lark(f"start: {slashed(pattern)}")


def choice(texts: Sequence[str]) -> str:
    """One of these texts."""
    return lark("start: " + " | ".join(map(quoted, texts)))


def lark(grammar: str) -> str:
    """Text that the rule `start` of this grammar derives."""
    return _written([{"lark_grammar": grammar}])


def composed(grammar: str, parts: Sequence[dict[str, Any]]) -> str:
    """Text that the rule `start` derives, where `@name` stands for the part with that name."""
    return _written([{"lark_grammar": grammar}, *parts])


def parts_of(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar made here; it starts with the first."""
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def places(schema: Any, keywords: AbstractSet[str], value_is: Any = None, at: str = "") -> Iterator[str]:
    """JSON pointers to these keywords in the schema, in its order; if `value_is` is given, only with that value."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from places(item, keywords, value_is, f"{at}/{i}")
    elif isinstance(schema, dict):
        for name, value in schema.items():
            below = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
            if name in keywords and value_is in (None, value):
                yield below
            if name in NAMED_SCHEMAS and isinstance(value, dict):
                for inner, item in value.items():
                    deeper = f"{below}/{inner.replace('~', '~0').replace('/', '~1')}"
                    yield from places(item, keywords, value_is, deeper)
            elif name not in PLAIN_VALUES:
                yield from places(value, keywords, value_is, below)


def _written(parts: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"grammars": parts}, separators=(",", ":"), ensure_ascii=False)


def check_lark(grammar: Any) -> Any:
    """Raises ValueError for rules in GBNF's style ('::='). Other checks handle values that are not text."""
    if isinstance(grammar, str) and "::=" in grammar:
        raise ValueError("rules are written with ':' here (Lark as llguidance reads it), not with '::='")
    return grammar


def quoted(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def slashed(pattern: str) -> str:
    """A regular expression in Lark's syntax."""
    return f"/{_TO_ESCAPE.sub(_escaped, pattern)}/"


def _escaped(found: re.Match[str]) -> str:
    """The form between slashes, on one line."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found.group(), found.group())
