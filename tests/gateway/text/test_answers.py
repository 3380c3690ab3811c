"""The grammar of a whole answer: what it lets a model write is parsed as reasoning, calls and text."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from tests.examples import few
from tests.gateway.text.tool_formats.walks import Vocabulary, markers_in, vocabulary, walk

from pagoda_gateway.text.answers import AnswerReader, Calling, Demand, Formats, HowRead, Wanted
from pagoda_gateway.text.events import CallArguments, CallBegun, Text, Thought, merged
from pagoda_gateway.text.reasoning import Thinking
from pagoda_gateway.text.tool_formats.functions import Function, NotEnforced
from pagoda_proto import grammars

ADD = Function(
    name="add",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]}
FORM = grammars.json_schema(SCHEMA | {"additionalProperties": False})
BOTH = [
    ("hermes", "qwen3"),
    ("qwen3_coder", "mistral"),
    ("openai", "openai_gptoss"),
    ("kimi_k3", "kimi_k3"),
    ("llama3_json", "qwen3"),
]


def made(tools: str, reasoning: str) -> tuple[Formats, Vocabulary]:
    """Formats and vocabulary of a model whose markers are tokens."""
    bare = Formats.of("", {}, tools, reasoning)
    assert bare.tools is not None
    assert bare.reasoning is not None
    known = vocabulary(markers_in((*bare.tools.markers, *bare.reasoning.markers)))
    return Formats.of("", known.markers, tools, reasoning), known


def admits(known: Vocabulary, grammar: str, text: str) -> bool:
    matcher = LLMatcher(known.tokenizer, grammar, log_level=0, limits=LLParserLimits(**grammars.LIMITS))
    assert not matcher.is_error(), matcher.get_error()
    ids = known.tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(formats: Formats, how: HowRead, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls."""
    reader = AnswerReader(formats, how)
    events = [event for char in text for event in reader.push(char)] + reader.flush()
    calls = {event.index: [event.name, ""] for event in events if isinstance(event, CallBegun)}
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    thoughts = "".join(event.text for event in events if isinstance(event, Thought))
    said = "".join(event.text for event in events if isinstance(event, Text))
    return thoughts, said, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize(("tools", "reasoning"), BOTH)
@pytest.mark.parametrize("thinking", list(Thinking))
@pytest.mark.parametrize("demand", list(Demand))
def test_calls_come_after_thoughts(tools: str, reasoning: str, thinking: Thinking, demand: Demand) -> None:
    formats, known = made(tools, reasoning)
    grammar = Wanted(calling=Calling(functions=(ADD,), demand=demand)).grammar(formats, thinking)
    for seed in range(3):
        written = walk(grammar, known, seed)
        thoughts, said, calls = read(formats, HowRead(thinking=thinking, functions=(ADD,)), written)
        assert not thoughts or thinking is not Thinking.OVER
        assert (calls and not said) or demand is Demand.AUTO
        for name, arguments in calls:
            assert name == "add"
            jsonschema.validate(arguments, ADD.parameters or {})


@pytest.mark.parametrize(("tools", "reasoning"), BOTH)
@pytest.mark.parametrize("thinking", list(Thinking))
def test_a_form_is_that_of_the_answer_and_not_of_thoughts(tools: str, reasoning: str, thinking: Thinking) -> None:
    formats, known = made(tools, reasoning)
    grammar = Wanted(form=FORM).grammar(formats, thinking)
    assert grammar != FORM or thinking is Thinking.OVER
    for seed in range(2):
        written = walk(grammar, known, seed)
        _, said, _ = read(formats, HowRead(thinking=thinking), written)
        if thinking is not Thinking.OVER or not (formats.reasoning and formats.reasoning.answer):
            jsonschema.validate(json.loads(said), SCHEMA)


@pytest.mark.parametrize(("tools", "reasoning"), [("hermes", "qwen3"), ("openai", "openai_gptoss")])
def test_with_a_form_an_answer_is_calls_or_that(tools: str, reasoning: str) -> None:
    formats, known = made(tools, reasoning)
    grammar = Wanted(calling=Calling(functions=(ADD,)), form=FORM).grammar(formats, Thinking.POSSIBLE)
    for seed in range(4):
        how = HowRead(thinking=Thinking.POSSIBLE, functions=(ADD,))
        _, said, calls = read(formats, how, walk(grammar, known, seed))
        assert bool(said) != bool(calls)
        if said:
            jsonschema.validate(json.loads(said), SCHEMA)


@pytest.mark.parametrize(("tools", "reasoning"), BOTH)
@settings(max_examples=few(25), deadline=None)
@given(data=st.data())
def test_it_does_not_matter_how_an_answer_is_cut(tools: str, reasoning: str, data: st.DataObject) -> None:
    formats, _ = made(tools, reasoning)
    markers = [text for each in (formats.tools, formats.reasoning) if each for text in each.markers if text]
    words = st.sampled_from(
        [*markers, '{"name": "add", "arguments": {"a": 1}}', "add", "=1>", "\n", "x", '"', "é🙂", "<"]
    )
    text = "".join(data.draw(st.lists(words, max_size=14)))
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    how = HowRead(thinking=data.draw(st.sampled_from(Thinking)), functions=(ADD,))
    whole, cut = AnswerReader(formats, how), AnswerReader(formats, how)
    at_once = merged(whole.push(text) + whole.flush())
    assert merged([event for piece in pieces for event in cut.push(piece)] + cut.flush()) == at_once


def test_channels_may_alternate_before_a_call() -> None:
    formats, known = made("openai", "openai_gptoss")
    grammar = Wanted(calling=Calling(functions=(ADD,), demand=Demand.REQUIRED)).grammar(formats, Thinking.POSSIBLE)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    assert all(admits(known, grammar, thought * count + call) for count in range(3))
    how = HowRead(thinking=Thinking.POSSIBLE, functions=(ADD,))
    assert read(formats, how, thought * 2 + call) == ("Hm.\nHm.", "", [("add", {"a": 1})])


def test_what_stands_around_an_answer_is_layout() -> None:
    formats, _ = made("kimi_k3", "kimi_k3")
    call = (
        '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    said = "<|open|>response<|sep|>Well.<|close|>response<|sep|>"
    how = HowRead(thinking=Thinking.OPEN, functions=(ADD,))
    text = f"Hm.<|close|>think<|sep|>{said}{call}<|close|>message<|sep|>"
    assert read(formats, how, text) == ("Hm.", "Well.", [("add", {"a": 1})])


def test_thoughts_have_at_most_their_budget() -> None:
    formats, known = made("hermes", "qwen3")
    grammar = Wanted(budget=3).grammar(formats, Thinking.OPEN)
    assert admits(known, grammar, "abc</think>and so on")
    assert admits(known, grammar, "</think>and so on")
    assert not admits(known, grammar, "abcd</think>and so on")
    possible = Wanted(budget=3).grammar(formats, Thinking.POSSIBLE)
    assert admits(known, possible, "no thoughts at all")
    assert not admits(known, possible, "<think>abcd</think>")
    assert Wanted(budget=3).grammar(formats, Thinking.OVER) == ""


def test_thoughts_may_be_forbidden() -> None:
    formats, known = made("hermes", "qwen3")
    for wanted in (Wanted(thinks=False), Wanted(budget=0)):
        assert admits(known, wanted.grammar(formats, Thinking.OPEN), "</think>x")
        assert not admits(known, wanted.grammar(formats, Thinking.OPEN), "a</think>x")
        assert not admits(known, wanted.grammar(formats, Thinking.POSSIBLE), "<think>a</think>x")
        assert admits(known, wanted.grammar(formats, Thinking.POSSIBLE), "x")


def test_an_answer_of_which_nothing_is_wanted_has_no_grammar() -> None:
    formats, _ = made("hermes", "qwen3")
    assert [Wanted().grammar(formats, thinking) for thinking in (None, *Thinking)] == [""] * 4
    assert Wanted(form=FORM).grammar(formats, None) == FORM


def test_one_call_is_one_call() -> None:
    formats, known = made("hermes", "qwen3")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for demand in Demand:
        one, more = (
            Wanted(calling=Calling(functions=(ADD,), demand=demand, several=several)).grammar(formats, None)
            for several in (False, True)
        )
        assert admits(known, one, call)
        assert not admits(known, one, f"{call}\n{call}")
        assert admits(known, more, f"{call}\n{call}")
        assert not admits(known, more, call.replace('"a": 1', '"a": "x"'))
        assert not admits(known, more, call.replace("add", "sub"))
        assert admits(known, more, "some text") == (demand is Demand.AUTO)


@pytest.mark.parametrize(
    ("tools", "parameters", "pointer"),
    [
        ("hermes", {"properties": {"a": {"not": {}}}}, "/properties/a/not"),
        ("hermes", {"properties": {"a": {"items": {"uniqueItems": True}}}}, "/properties/a/items/uniqueItems"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "format": "date"}}}, "/properties/a/format"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "a|b"}}}, "/properties/a/pattern"),
        ("qwen3_coder", {"properties": {"a": {"type": "string"}}, "minProperties": 1}, "/minProperties"),
        ("qwen3_coder", {}, ""),
        ("pythonic", {"properties": {"a": {"type": "array", "maxItems": 1}}}, "/properties/a/maxItems"),
        ("pythonic", {"properties": {"a": {}}}, "/properties/a"),
    ],
)
def test_what_a_strict_function_cannot_be_held_to_is_named(
    tools: str, parameters: dict[str, Any], pointer: str
) -> None:
    formats, known = made(tools, "qwen3")
    strict = Function(name="f", parameters=parameters, strict=True)
    with pytest.raises(NotEnforced) as caught:
        Wanted(calling=Calling(functions=(ADD, strict))).grammar(formats, None)
    assert (caught.value.function, caught.value.pointer) == ("f", pointer)
    lax = Function(name="f", parameters=parameters)
    walk(Wanted(calling=Calling(functions=(lax,), demand=Demand.REQUIRED)).grammar(formats, None), known, 1)


def test_a_marker_spelled_out_begins_no_call() -> None:
    """If the marker is a token, a model that writes about it must not slip into a call unconstrained by its schema."""
    formats, known = made("hermes", "qwen3")
    grammar = Wanted(calling=Calling(functions=(ADD,))).grammar(formats, None)
    matcher = LLMatcher(known.tokenizer, grammar, log_level=0)
    spelled = list(b"<tool_call>")
    by_bytes = [next(i for i, text in enumerate(known.texts) if text == bytes([byte])) for byte in spelled]
    assert matcher.try_consume_tokens(by_bytes) < len(by_bytes)
