from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagoda_engine_core.grammars.bounds import leaks
from pagoda_engine_core.grammars.pointing import leaking, located
from pagoda_proto import grammars


@pytest.mark.parametrize(
    ("problem", "grammar", "told"),
    [
        (
            'Unimplemented keys: ["not"]',
            grammars.json_schema({"items": {"not": {}}}),
            '/items/not: Unimplemented keys: ["not"]',
        ),
        (
            "Unknown format: regex",
            grammars.json_schema({"properties": {"format": {"format": "uuid"}, "a": {"format": "regex"}}}),
            "/properties/a/format: Unknown format: regex",
        ),
        (
            "min/maxProperties only supported when ..",
            grammars.json_schema({"items": {"maxProperties": 3}}),
            "/items/maxProperties: min/maxProperties only supported when ..",
        ),
        ('Unimplemented keys: ["not"]', grammars.json_schema({}), 'Unimplemented keys: ["not"]'),
        ('Unimplemented keys: ["not"]', "start: /a/", 'Unimplemented keys: ["not"]'),
        ('Unimplemented keys: ["not"]', "[]", 'Unimplemented keys: ["not"]'),
        (
            'Unimplemented keys: ["not"]',
            grammars.composed(
                "start: @a @b", [{"name": "a", "json_schema": {}}, {"name": "b", "json_schema": {"not": 1}}]
            ),
            '/not: Unimplemented keys: ["not"]',
        ),
        ("Invalid type: bogus", grammars.json_schema({"type": "bogus"}), "Invalid type: bogus"),
    ],
)
def test_a_problem_with_a_keyword_says_where_it_stands(problem: str, grammar: str, told: str) -> None:
    assert located(problem, grammar) == told


class Read(dict[str, Any]):
    """Counts how often a keyword is read."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        Read.asked += 1
        return super().get(key, default)


def test_a_keyword_is_read_a_few_times_however_many_parts_hold_together() -> None:
    counts = []
    for number in (100, 200):
        Read.asked = 0
        assert list(leaks({"anyOf": [Read(type="number", exclusiveMaximum=5) for _ in range(number)]})) == []
        counts.append(Read.asked)
    assert counts[1] < 2.1 * counts[0]


NEAR = "a whole number that is itself excluded needs one or more between it and the other bound"
LEAKS = [
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, f"/exclusiveMinimum: {NEAR}", "0"),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.1}, f"/exclusiveMinimum: {NEAR}", "0"),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, f"/exclusiveMaximum: {NEAR}", "-0"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, f"/exclusiveMinimum: {NEAR}", "1"),
    ({"type": "number", "exclusiveMinimum": 10, "exclusiveMaximum": 10.5}, f"/exclusiveMinimum: {NEAR}", "10"),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, f"/exclusiveMaximum: {NEAR}", "-1"),
    (
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
        f"/allOf/0/exclusiveMinimum: {NEAR}",
        "0",
    ),
    (
        {"type": "number", "maximum": 0.5, "anyOf": [{"exclusiveMinimum": 0}, {"type": "null"}]},
        f"/anyOf/0/exclusiveMinimum: {NEAR}",
        "0",
    ),
    (
        {"type": "integer", "minimum": 10**20, "maximum": 2 * 10**20},
        "/minimum: whole numbers are of 64 bits, and none of these fits",
        str(2**63 - 1),
    ),
]
KEPT = [
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "number", "minimum": -1, "exclusiveMaximum": 0},
    {"type": "number", "minimum": 0, "maximum": 0.5},
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 5},
    {"type": "integer", "maximum": 10**20},
    {"type": "number", "exclusiveMinimum": True, "minimum": 0},
    {"type": "number", "minimum": 0.1, "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.7},
    {"type": "number", "exclusiveMinimum": 1, "maximum": 2},
    {"const": 0.3, "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "string", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": ["integer", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 0.9},
    {"anyOf": [{"type": "number", "exclusiveMinimum": 5}, {"type": "string"}]},
    {"$ref": "#/$defs/a/~1", "$defs": {"a": {"/": True}}, "allOf": 3, "anyOf": [True]},
    {"enum": [{"exclusiveMinimum": 0, "maximum": 0.5}]},
    {"properties": {"exclusiveMinimum": {"type": "integer"}}},
]


@pytest.mark.parametrize(("schema", "told", "text"), LEAKS)
def test_a_bound_that_the_grammar_does_not_keep_says_where_it_stands(
    schema: dict[str, Any], told: str, text: str
) -> None:
    """llguidance accepts a text that the schema forbids; once it no longer does, the bound need not be refused."""
    grammar = grammars.json_schema(schema)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if not matcher.is_error():
        assert matcher.try_consume_tokens(list(text.encode())) == len(text)
        assert matcher.is_accepting()
    assert leaking(grammar) == told
    inner = grammars.json_schema({"properties": {"a": {"items": schema}}})
    assert leaking(inner) == f"/properties/a/items{told}"


@pytest.mark.parametrize("schema", KEPT)
def test_other_bounds_are_kept(schema: dict[str, Any]) -> None:
    assert leaking(grammars.json_schema(schema)) == ""


def test_what_no_text_fits_is_said_in_words() -> None:
    assert "nothing that fits" in located("NoExtensionBias", grammars.json_schema({"$ref": "#"}))
    assert leaking("start: /a/") == ""
