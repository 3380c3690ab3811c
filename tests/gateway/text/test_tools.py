"""Tool calls: any chunking gives the same events; nothing malformed ever becomes a call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_gateway.text.events import CallArguments, CallBegun, Said, Text
from pagoda_gateway.text.tools import HermesParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'


@dataclass(frozen=True)
class ToolCall:
    index: int
    name: str
    arguments: str


def told(events: list[Said]) -> list[str | ToolCall]:
    """Text as it is, and what makes a call as one."""
    found: list[str | ToolCall] = []
    for event in events:
        if isinstance(event, Text):
            found.append(event.text)
        elif isinstance(event, CallBegun):
            found.append(ToolCall(event.index, event.name, ""))
        else:
            assert isinstance(event, CallArguments)
            begun = found.pop()
            assert isinstance(begun, ToolCall)
            assert begun.index == event.index
            found.append(ToolCall(begun.index, begun.name, begun.arguments + event.text))
    return found


def run(pieces: list[str]) -> list[str | ToolCall]:
    parser = HermesParser()
    events = told([event for piece in pieces for event in parser.push(piece)] + parser.flush())
    merged: list[str | ToolCall] = []
    for event in events:
        if isinstance(event, str) and merged and isinstance(merged[-1], str):
            merged[-1] += event
        else:
            merged.append(event)
    return merged


PARTS = st.sampled_from([
    CALL, "<tool_call>", "</tool_call>", "<tool_", "\n", "  ", "text", '"', "\\", '{"name": "f"}', '{"name": "f", ',
    '"arguments": {"s": "</tool_call>"}}', "<", "}", "{", "é🙂", '<tool_call>{"name": "g", "arguments": {}}',
    '\\"', '{"name": "q", "arguments": "{\\"x\\": 1}"}',
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(PARTS, max_size=10), cuts=st.lists(st.integers(0, 300), max_size=20))
def test_any_chunking_gives_the_same_events(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = run([text])
    assert run([text[a:b] for a, b in pairwise(edges)]) == whole
    assert run(list(text)) == whole


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(PARTS, max_size=10))
def test_calls_are_well_formed_and_nothing_but_layout_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    events = run([text])
    for i, call in enumerate(event for event in events if isinstance(event, ToolCall)):
        assert call.index == i
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)
    shown = "".join(event for event in events if isinstance(event, str))
    if not any(isinstance(event, ToolCall) for event in events):
        assert shown == text
    position = 0
    for word in shown.split():
        position = text.index(word[0], position) + 1  # shown text is a subsequence of the input


def test_text_call_text_call() -> None:
    events = run([f"Let me see.\n{CALL}\n{CALL}\n done"])
    arguments = '{"a": 1, "b": [2, "x"]}'
    assert events == ["Let me see.", ToolCall(0, "add", arguments), ToolCall(1, "add", arguments), "done"]


def test_text_before_a_call_streams_at_once() -> None:
    parser = HermesParser()
    assert told(parser.push("I will look <")) == ["I will look"]
    assert told(parser.push("3 that")) == [" <3 that"]
    assert told(parser.push(" up.\n<tool_call>")) == [" up."]
    assert told(parser.push('{"name": "f", "arguments": {"q": "a</tool_call>b"}}</tool')) == []
    assert told(parser.push("_call>")) == [ToolCall(0, "f", '{"q": "a</tool_call>b"}')]
    assert parser.push("\n") == parser.flush() == []


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "f", "arguments": [1]}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": "f", "arguments": "rm -rf"}',
        '["f"]',
        '{"name": "f", "arguments": ' + "[" * 100_000,
        "__import__('os').system('true')",
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    text = f"a <tool_call>{body}</tool_call> b"
    assert run([text]) == [text]


def test_a_call_without_its_closing_tag_counts_if_whole() -> None:
    assert run(['<tool_call>{"name": "f"}']) == [ToolCall(0, "f", "{}")]
    assert run(['hm\n<tool_call>{"name": "f"']) == ['hm\n<tool_call>{"name": "f"']


def test_a_broken_call_does_not_hide_the_next() -> None:
    events = run(['<tool_call>\n{"name": "f}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'])
    assert events == ['<tool_call>\n{"name": "f}\n</tool_call>', ToolCall(0, "g", "{}")]
