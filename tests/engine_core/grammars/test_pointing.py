from __future__ import annotations

import pytest

from pagoda_engine_core.grammars.pointing import located
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
