from __future__ import annotations

import pytest

from pagoda_engine_core.grammars.pointing import located, pointers
from pagoda_proto import grammars


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"not": {}}, ["/not"]),
        ({"properties": {"not": {"type": "string"}}}, []),
        (
            {"properties": {"a": {"not": {}}, "b": {"anyOf": [{}, {"not": {}}]}}},
            ["/properties/a/not", "/properties/b/anyOf/1/not"],
        ),
        ({"$defs": {"x~y/z": {"items": {"not": {}}}}}, ["/$defs/x~0y~1z/items/not"]),
        ({"enum": [{"not": 1}], "const": {"not": 1}, "default": {"not": 1}}, []),
        ({"not": {"not": {}}}, ["/not", "/not/not"]),
        (True, []),
    ],
)
def test_keywords_are_found_where_they_are_keywords(schema: object, found: list[str]) -> None:
    assert list(pointers(schema, "not")) == found


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
        ("Invalid type: bogus", grammars.json_schema({"type": "bogus"}), "Invalid type: bogus"),
    ],
)
def test_a_problem_with_a_keyword_says_where_it_stands(problem: str, grammar: str, told: str) -> None:
    assert located(problem, grammar) == told
