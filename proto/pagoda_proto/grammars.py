"""What output may look like, as one string on every wire: a grammar as llguidance reads it.

Whoever has a schema, a regular expression or a list of words makes it such a string here, once; nobody else reads it
but those who compile it. `LIMITS` are what both of them compile under. They count work and not time, so that a grammar
is refused, and a row fails, in the same place wherever and however often it is computed.
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
    "step_lexer_fuel": 200_000,  # of one mask: about 14 ms
    "step_max_items": 50_000,
    "max_items_in_row": 500,  # what an ambiguous grammar costs grows with its square
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 250_000,
    "verbose_errors": False,  # they would show what the client wrote
}
MAX_REGEX_CHARS = 4096
MAX_CHOICES = 1024

# Keywords of JSON schemas that no grammar is made of; tests hold llguidance to it.
UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames",
    "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)  # names to schemas
PLAIN_VALUES = frozenset({"enum", "const", "default", "examples", "x-guidance"})  # values that are no schemas
FORMATS = frozenset({
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""Those that JSON Schema defines. Others are notes of whoever wrote them, which it says nobody is held to."""
WHITE_SPACE = r" |\r?\n[ \t]{0,64}"
_TO_ESCAPE = re.compile(r"\\.|[/\n]", re.DOTALL)


def json_schema(schema: dict[str, Any]) -> str:
    """JSON that the schema admits; its properties stand in the order of the schema's.

    Between its parts there is a space, or a line break and what indents the next line, or nothing: a model that is free
    to write white space may never stop. A schema with llguidance's `x-guidance` says for itself.
    """
    return _written([schema_part(schema)])


def schema_part(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, as a part of a composed grammar."""
    return {"json_schema": written(schema)}


def written(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with how much white space there may be, and without formats that are notes."""
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
    """What the pattern matches as a whole."""
    return lark(f"start: {slashed(pattern)}")


def choice(texts: Sequence[str]) -> str:
    """One of these texts."""
    return lark("start: " + " | ".join(map(quoted, texts)))


def lark(grammar: str) -> str:
    """What the rule `start` of this grammar derives."""
    return _written([{"lark_grammar": grammar}])


def composed(grammar: str, parts: Sequence[dict[str, Any]]) -> str:
    """What the rule `start` derives, where `@name` stands for the part of this name."""
    return _written([{"lark_grammar": grammar}, *parts])


def parts_of(grammar: str) -> list[dict[str, Any]]:
    """What a grammar made here is composed of; the first one is where it starts."""
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def places(schema: Any, keywords: AbstractSet[str], value_is: Any = None, at: str = "") -> Iterator[str]:
    """JSON pointers of where one of these stands as a keyword, with this value if one is given, in the order of the
    schema."""
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
    """Raises ValueError for the other way to write rules. What is no text is left to others."""
    if isinstance(grammar, str) and "::=" in grammar:
        raise ValueError("rules are written with ':' here (Lark as llguidance reads it), not with '::='")
    return grammar


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def slashed(pattern: str) -> str:
    """A regular expression as Lark writes it."""
    return f"/{_TO_ESCAPE.sub(_escaped, pattern)}/"


def _escaped(found: re.Match[str]) -> str:
    """As it stands between slashes, on one line."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found.group(), found.group())
