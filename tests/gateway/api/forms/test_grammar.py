"""Structural tags become grammars that admit exactly what the tags say, tested with single-byte tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from pydantic import ValidationError

from pagoda_gateway.api.forms.grammar import structural_tag
from pagoda_gateway.api.forms.tags import StructuralTag
from pagoda_proto.grammars import LIMITS

BYTES = LLTokenizer("byte")
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def schema(value: dict[str, Any] = OBJECT) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def triggered(*found: dict[str, Any], triggers: list[str], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(found), **more}


def separated(*found: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": list(found), "separator": ", ", **more}


TEXT = {"type": "any_text"}
F, G = tag("<f=a>", schema(), "</f>"), tag("<f=b>", const("x"), "</f>")
CALLS = triggered(F, G, triggers=["<f="])
OLDER = {"structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f"]}
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (const('a"\n/'), ['a"\n/'], ["", "a", "b"]),
    (schema(), ['{"a": 1}'], ["{}", '{"a": 1} ']),
    (regex("[a-c]+/?"), ["abc", "a/"], ["", "d"]),
    ({"type": "grammar", "grammar": 'start: "yes" | no\nno: "no"'}, ["yes", "no"], ["", "yesno"]),
    (TEXT, ["", "a\nb", "<f=", "é"], []),
    ({"type": "any_text", "excludes": ["<f", "bad"]}, ["", "<", "ba d"], ["<f", "x bad y"]),
    (sequence(const("a"), regex("[a-z]*"), const("z")), ["az", "abzz"], ["a", "z", "ab"]),
    (sequence(TEXT, const("."), schema()), ['.{"a": 1}', 'x!.{"a": 1}'], ['{"a": 1}', 'x.y.{"a": 1}']),
    (sequence(schema(), const(" "), schema()), ['{"a": 1} {"a": 2}'], ['{"a": 1}{"a": 2}']),
    (either(const("a"), const("ab"), schema()), ["a", "ab", '{"a": 1}'], ["", "b", "aab"]),
    (sequence(either(const("a"), TEXT), const("!"), const("?")), ["a!?", "!?", "x!?"], ["a!", "x!x!?"]),
    (sequence({"type": "optional", "content": TEXT}, const("!")), ["!", "x!"], ["x"]),
    (sequence({"type": "optional", "content": const("x")}, schema()), ['x{"a": 1}', '{"a": 1}'], ["x", ""]),
    ({"type": "plus", "content": tag("[", schema(), "]")}, ['[{"a": 1}]' * 3], [""]),
    ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": tag("[", TEXT, "]")}, ["[a][b]", "[][][c]"], ["[a]", ""]),
    (tag("<t>", TEXT, "</t>"), ["<t></t>", "<t>a</</t>"], ["<t>", "<t></t>x"]),
    (tag("<t>", TEXT, ["</t>", "<end/>"]), ["<t>a</t>", "<t>a<end/>"], ["<t>a"]),
    (tag("<t>", schema(), ["!", ""]), ['<t>{"a": 1}!', '<t>{"a": 1}'], ["<t>"]),
    (sequence(tag("<t>", TEXT, "</t>"), schema()), ['<t>hm</t>{"a": 1}'], ['hm{"a": 1}']),
    (CALLS, ["", "hello", 'so <f=a>{"a": 1}</f> and <f=b>x</f>.', "<f"], ["<f=", "<f=c>", "<f=b>y</f>", "<f=b>x"]),
    (triggered(F, G, triggers=["<f=a", "<f=b"]), ["<f=", "a<f=b>x</f>"], ["<f=a"]),
    (triggered(F, G, triggers=["<f="], at_least_one=True), ["<f=b>x</f>", "<f=b>x</f>, <f=b>x</f>!"], ["", "a"]),
    (triggered(F, G, triggers=["<f="], stop_after_first=True), ["", "a<f=b>x</f>"], ["<f=b>x</f>."]),
    (triggered(G, triggers=["<"], at_least_one=True, stop_after_first=True), ["<f=b>x</f>"], ["", "<f=b>x</f>."]),
    (triggered(G, triggers=["<"], excludes=["no"]), ["n o<f=b>x</f>n"], ["no", "no<f=b>x</f>", "<f=b>x</f>no"]),
    (tag("[", CALLS, "]"), ["[]", "[a<f=b>x</f>b]", '[<f=a>{"a": 1}</f>]'], ["[", "[<f=b>x]</f>"]),
    (tag("[", triggered(G, triggers=["<"], stop_after_first=True), "]"), ["[a<f=b>x</f>]", "[a]"], ["[<f=b>x</f>a]"]),
    (separated(F, G), ["", "<f=b>x</f>", '<f=b>x</f>, <f=a>{"a": 1}</f>'], ["<f=b>x</f>,", "<f=b>x</f><f=b>x</f>"]),
    (separated(G, at_least_one=True), ["<f=b>x</f>, <f=b>x</f>"], [""]),
    (tag("(", separated(G, stop_after_first=True), ")"), ["()", "(<f=b>x</f>)"], ["(<f=b>x</f>, <f=b>x</f>)"]),
]  # fmt: skip


def matcher(grammar: str, tokenizer: LLTokenizer = BYTES) -> LLMatcher:
    made = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    assert not made.is_error(), (made.get_error(), grammar)
    return made


def admits(grammar: str, text: str) -> bool:
    made, data = matcher(grammar), list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


@pytest.mark.parametrize(("form", "admitted", "refused"), FORMS, ids=range(len(FORMS)))
def test_a_format_admits_what_it_says(form: dict[str, Any], admitted: list[str], refused: list[str]) -> None:
    grammar = structural_tag(StructuralTag.model_validate({"format": form}), {})
    assert [text for text in admitted if not admits(grammar, text)] == []
    assert [text for text in refused if admits(grammar, text)] == []


def test_the_older_shape_says_the_same() -> None:
    grammar = structural_tag(StructuralTag.model_validate(OLDER), {})
    assert admits(grammar, 'so <f=a>{"a": 1}</f>!')
    assert admits(grammar, "nothing")
    assert not admits(grammar, "so <f=a>{}</f>")
    assert not admits(grammar, "so <fx")


def test_special_tokens_are_written_as_tokens() -> None:
    special = {"<f=": 7, "</t>": 8, "\n</t>": 9}
    call = tag("<f=\n", const("a<f=b"), ["</t>", "x"])
    made = structural_tag(StructuralTag.model_validate({"format": triggered(call, triggers=["<f="])}), special)
    main = json.loads(made)["grammars"][0]["lark_grammar"]
    assert "<[7]> T" in main.replace('"', "") or "<[7]>" in main
    assert "<f=" not in main
    thought = tag("<t>", TEXT, ["</t>", "stop"])
    main = structural_tag(StructuralTag.model_validate({"format": thought}), special)
    assert "<[8]>" in main
    assert "</t>" not in main
    with pytest.raises(ValueError, match="has a special token after plain text"):
        structural_tag(StructuralTag.model_validate({"format": tag("a", TEXT, "b</t>")}), special)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"format": {"type": "token", "token": "x"}}, "'token'"),
    ({"format": schema() | {"style": "qwen_xml"}}, "style"),
    ({"format": schema() | {"any_order": True}}, "any_order"),
    ({"format": TEXT | {"max_tokens": 5}}, "max_tokens"),
    ({"format": {"type": "grammar", "grammar": 'root ::= "a"'}}, "not with '::='"),
    ({"format": triggered(F, triggers=["<f=", "<f=a"])}, "exactly one of the triggers"),
    ({"format": triggered(F, triggers=["<f=", "[x"])}, "begins no tag"),
    ({"format": triggered(F, triggers=[])}, "at least 1"),
    ({"format": {"type": "repeat", "min": 3, "max": 2, "content": TEXT}}, "max must be at least min"),
    ({"format": TEXT, "triggers": ["x"], "structures": []}, ""),
    ({"structures": OLDER["structures"]}, "give either"),
    ({}, "give either"),
    ({"format": TEXT, "more": 1}, "more"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_here_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        StructuralTag.model_validate(fields)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "form",
    [
        sequence(TEXT, TEXT),
        sequence(TEXT, schema()),
        sequence(CALLS, regex("a")),
        {"type": "star", "content": TEXT},
        {"type": "plus", "content": sequence(const("a"), CALLS)},
        tag("a", TEXT, ["b", ""]),
    ],
)
def test_free_text_needs_something_to_end_it(form: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="free text"):
        structural_tag(StructuralTag.model_validate({"format": form}), {})


PIECES = st.recursive(
    st.text("ab<\n", min_size=1, max_size=3).map(const),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda found: sequence(*found)),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: either(*found)),
        inner.map(lambda one: {"type": "optional", "content": one}),
        st.tuples(st.text("ab", max_size=2), inner, st.text("ab", max_size=2)).map(lambda parts: tag(*parts)),
    ),
    max_leaves=6,
)


def first_of(form: dict[str, Any]) -> str:
    """A text that the form admits."""
    match form["type"]:
        case "const_string":
            return str(form["value"])
        case "sequence":
            return "".join(map(first_of, form["elements"]))
        case "or":
            return first_of(form["elements"][-1])
        case "optional":
            return first_of(form["content"])
    return form["begin"] + first_of(form["content"]) + form["end"]


@settings(max_examples=60, deadline=None)
@given(PIECES)
def test_any_nesting_of_regular_pieces_is_exact(form: dict[str, Any]) -> None:
    """They are compiled to one terminal, so no piece swallows the next."""
    assert admits(structural_tag(StructuralTag.model_validate({"format": form}), {}), first_of(form))


@pytest.mark.parametrize("element", [{"type": "any_text"}, const("a")])
def test_sec_16_ends_are_not_written_for_each_of_many_alternatives(element: dict[str, Any]) -> None:
    many = either(*[element] * 500, {"type": "any_text"})
    form = StructuralTag.model_validate({"format": tag("b", many, [f"{i}{'x' * 1000}" for i in range(500)])})
    with pytest.raises(ValueError, match="more than"):
        structural_tag(form, {})
