"""llguidance reads grammars as the builders mean them: tested over single bytes, with Python's own idea as oracle."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagoda_proto import grammars

BYTES = LLTokenizer("byte")
LIMITS = LLParserLimits(**grammars.LIMITS)


def admits(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=4, unique=True), st.text(max_size=6))
def test_a_choice_admits_its_texts_and_no_others(texts: list[str], other: str) -> None:
    grammar = grammars.choice(texts)
    assert all(admits(grammar, text) for text in texts)
    assert admits(grammar, other) == (other in texts)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "/", "\\/", "\n", "\\n", "\\\\", "[/]", "b*", '"', "\\\n"]), min_size=1, max_size=6)
)
def test_an_expression_means_what_it_means_elsewhere(parts: list[str]) -> None:
    pattern, grammar = "".join(parts), grammars.regex("".join(parts))
    for text in ("", "a", "/", "a/", "\n", "\\", "a\n", "\\/", '"', "b", "abb", "\\n", "//", "a/\n\\"):
        assert admits(grammar, text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": [1, 2], "b": null}', True),
        ('{"a":[1,2],"b":null}', True),
        ('{\n  "a": [\n    1,\n    2\n  ],\n\t"b": null\n}', True),
        ('{"b": null, "a": [1, 2]}', False),  # not in the schema's order
        ('{"a":  [1, 2], "b": null}', False),  # too much white space
        ('{"a": [1, 2], "b": null} ', False),
    ],
)
def test_json_has_the_order_of_its_schema_and_little_white_space(text: str, fits: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "null"}}}
    assert admits(grammars.json_schema(schema), text) == fits


def test_a_schema_may_say_for_itself_what_white_space_it_wants() -> None:
    grammar = grammars.json_schema({"type": "array", "x-guidance": {"whitespace_flexible": False}})
    assert admits(grammar, "[1,2]")
    assert not admits(grammar, "[1, 2]")


def test_any_object_is_an_object() -> None:
    assert admits(grammars.json_object(), '{"a": [1, {"b": "é\\n"}], "c": null}')
    assert not admits(grammars.json_object(), "[1]")


def test_a_format_that_json_schema_does_not_know_is_a_note() -> None:
    """JSON Schema enforces neither Pydantic's paths nor OpenAPI's numbers; the formats that it defines stay."""
    schema = {
        "format": "path",
        "properties": {"format": {"type": "string", "format": "uuid"}, "b": {"format": "int64"}},
        "anyOf": [{"format": "binary"}, {"items": {"format": "date"}}],
        "enum": [{"format": "path"}],
        "const": {"format": "path"},
    }
    told = grammars.written(schema)
    assert told == {
        "x-guidance": {"whitespace_pattern": grammars.WHITE_SPACE},
        "properties": {"format": {"type": "string", "format": "uuid"}, "b": {}},
        "anyOf": [{}, {"items": {"format": "date"}}],
        "enum": [{"format": "path"}],
        "const": {"format": "path"},
    }
    assert schema["format"] == "path"
    assert admits(grammars.json_schema({"type": "string", "format": "path"}), '"no path"')


@pytest.mark.parametrize("keyword", sorted(grammars.UNSUPPORTED))
def test_keywords_that_are_called_unsupported_are(keyword: str) -> None:
    """Each makes a grammar fail, and the error names it; a keyword that belongs to another is reported with that."""
    value: object = {"minContains": 1, "maxContains": 1, "uniqueItems": True}.get(keyword, {})
    failed, told = LLMatcher.validate_grammar_with_warnings(grammars.json_schema({keyword: value}))
    assert failed
    assert keyword in told[0]


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
    assert list(grammars.places(schema, {"not"})) == found


def test_a_composed_grammar_holds_its_parts() -> None:
    part = {"name": "a", **grammars.schema_part({"const": 1})}
    grammar = grammars.composed('start: "<" @a ">"', [part])
    assert admits(grammar, "<1>")
    assert not admits(grammar, "<2>")
    assert grammars.parts_of(grammar)[1] == part
    assert grammars.parts_of(grammars.lark("start: /a/")) == [{"lark_grammar": "start: /a/"}]
