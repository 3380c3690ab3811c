"""A plan has the requested grammar, a looser one where that is impossible, or is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from pagoda_gateway.generation.answers import MAX_SCHEMA_VALUES, Plan, check_budget, num_values, plan_of
from pagoda_gateway.text.answers import AnswerReader, Calling, Formats, Wanted
from pagoda_gateway.text.tool_formats.families import TOOL_FORMATS
from pagoda_gateway.text.tool_formats.functions import Function
from pagoda_proto.errors import InvalidParams
from pagoda_proto.grammars import LIMITS
from pagoda_proto.params import MAX_GRAMMAR_CHARS

HERMES = Formats.of("<tool_call>", {})
STRING = {"type": "string"}
NAMES = tuple(dict.fromkeys(each.names[0] for each in TOOL_FORMATS))


def planned(*functions: Function, formats: Formats = HERMES) -> Plan:
    return plan_of(formats, Wanted(calling=Calling(functions=functions)), None, lambda name: f"tools.{name}")


def function(parameters: dict[str, Any], name: str = "f", strict: bool = False) -> Function:
    return Function(name=name, parameters=parameters, strict=strict)


def test_what_is_not_strict_has_a_grammar_that_says_less() -> None:
    plan = planned(function({"properties": {"a": STRING}}), function({"properties": {"b": STRING}}, "g", strict=True))
    assert '"a"' in plan.grammar
    assert '"a"' not in plan.loose_grammar
    assert '"b"' in plan.loose_grammar
    assert [each.name for each in plan.how.functions] == ["f", "g"]
    assert planned(function({"properties": {}}, strict=True)).loose_grammar == ""


def test_what_only_people_read_is_in_no_grammar() -> None:
    noted = {"description": "N1", "properties": {"description": {"type": "string", "title": "N2", "examples": ["N3"]}}}
    grammar = planned(function(noted)).grammar
    assert "description" in grammar
    assert not any(note in grammar for note in ("N1", "N2", "N3"))


def test_expressions_that_no_grammar_knows_are_passed_over_unless_they_are_strict() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "(?=x)y"}, "b": {"type": "string", "pattern": "^x+$"}}}
    assert "(?=" not in planned(function(schema)).grammar
    assert "x+" in planned(function(schema)).grammar
    assert "(?=" in planned(function(schema, strict=True)).grammar


def test_a_strict_function_is_refused_where_its_keyword_stands() -> None:
    with pytest.raises(InvalidParams) as caught:
        planned(function({"properties": {"a": {"not": {}}}}, strict=True))
    assert caught.value.param == "tools.f/properties/a/not"


@pytest.mark.parametrize("count", [MAX_SCHEMA_VALUES, 2000])
def test_sec_16_what_is_too_large_for_a_grammar_is_held_to_less(count: int) -> None:
    wide = {"properties": {f"p{i}{'x' * 80}": STRING for i in range(count)}}
    plan = planned(function(wide))
    assert len(plan.grammar) <= MAX_GRAMMAR_CHARS
    assert plan == planned(Function(name="f", parameters={}, loose=True))._replace(loose_grammar="")


def test_sec_16_what_is_too_large_and_strict_is_refused() -> None:
    wide = {"properties": {str(i): STRING for i in range(MAX_SCHEMA_VALUES)}}
    with pytest.raises(InvalidParams, match="tools: schemas of strict tools have at most"):
        planned(function(wide, strict=True))


def test_schemas_are_kept_where_values_are_read_by_them() -> None:
    asked = function({"properties": {"a": STRING}})
    assert planned(asked).how.functions == (Function(name="f"),)
    assert planned(asked, formats=Formats.of("", {}, "qwen3_coder")).how.functions == (asked,)


@pytest.mark.parametrize("name", NAMES)
def test_sec_16_schemas_that_lead_to_themselves_are_said_once(name: str) -> None:
    """Neither endless recursion nor doubling at every step makes a grammar larger than the schema warrants."""
    node: dict[str, Any] = {"type": "object", "properties": {f"c{i}": {"$ref": "#/$defs/n"} for i in range(6)}}
    steps: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3} for i in range(100)}
    hostile: list[dict[str, Any]] = [
        {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": node}},
        {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": steps | {"d100": STRING}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, STRING]}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"$ref": "#"},
        {"properties": {"a": {"type": 7, "enum": 3, "anyOf": {}, "properties": [], "required": 1}}, "required": {}},
        {"properties": 5},
    ]
    for schema in hostile:
        plan = planned(function(schema), formats=Formats.of("", {}, name))
        assert len(plan.grammar) < 40_000
        failed, _ = LLMatcher.validate_grammar_with_warnings(plan.loose_grammar, limits=LLParserLimits(**LIMITS))
        assert not failed


@pytest.mark.parametrize("name", NAMES)
def test_sec_16_schemas_that_lead_far_or_mean_much_are_held_to_less(name: str) -> None:
    """However long a chain of references, and however often a large definition is referred to."""
    formats = Formats.of("", {}, name)
    last: dict[str, Any] = {"type": "object", "properties": {"x": STRING}}
    chain = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(600)}
    either = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(600)}
    large = {"enum": ["x" * 100_000]}
    many = {f"p{i}": {"allOf": [{"$ref": "#/$defs/d0"}], "minLength": i} for i in range(600)}
    for schema in (
        {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain | {"d600": last}},
        {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": either | {"d600": last}},
        {"properties": many, "$defs": {"d0": large}},
    ):
        plan = planned(function(schema), formats=formats)
        assert len(plan.grammar) <= MAX_GRAMMAR_CHARS
        reader = AnswerReader(formats, plan.how)
        reader.push("x" if formats.tools is None else formats.tools.begin + "f")
        reader.flush()
        with suppress(InvalidParams):  # or it is expressed in full
            assert planned(function(schema, strict=True), formats=formats).loose_grammar == ""


def test_values_are_counted_no_further_than_to_too_many() -> None:
    assert num_values({"a": [1, {"b": 2}], "c": {}}) == 6
    assert num_values([0] * (2 * MAX_SCHEMA_VALUES)) == MAX_SCHEMA_VALUES + 1


def test_a_budget_needs_thoughts_that_can_be_ended() -> None:
    ids = {"<think>": 1, "</think>": 2}
    check_budget(Formats.of("<think></think>", ids), "f")
    for formats in (Formats.of("", ids), Formats.of("<think></think>", {})):
        with pytest.raises(InvalidParams, match="f: "):
            check_budget(formats, "f")
