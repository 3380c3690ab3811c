"""The forms in which a conversation may be given; no part of one is silently dropped."""

from __future__ import annotations

import datetime
from types import MappingProxyType
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from pagoda.offline.conversations import conversations
from pagoda_proto.errors import InvalidParams

USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "AB"}
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}
ODD = {"function": {"name": "f", "arguments": 5}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
DEEP: list[Any] = []
DEEP.append(DEEP)


@pytest.mark.parametrize(
    ("messages", "several"),
    [
        ([USER], [[USER]]),
        ((USER,), [[USER]]),
        ([MappingProxyType(USER)], [[USER]]),
        ([[USER], (USER, USER)], [[USER], [USER, USER]]),
        ([{"role": "user", "content": (TEXT, "x")}], [[{"role": "user", "content": [TEXT, "x"]}]]),
        ([{"role": "ipython", "content": "5", "name": "f"}], [[{"role": "ipython", "content": "5", "name": "f"}]]),
        ([{"role": "assistant", "tool_calls": [CALL]}], [[{"role": "assistant", "tool_calls": [CALL]}]]),
        ([{"role": "assistant", "content": None}], [[{"role": "assistant", "content": None}]]),
        ([ChatCompletionMessage(role="assistant", content="x")], [[{"role": "assistant", "content": "x"}]]),
    ],
)
def test_all_ways_to_give_one(messages: Any, several: Any) -> None:
    assert conversations(messages) == several


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": [TEXT, IMAGE]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "txt", "text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": b"abc"}], "messages[0].content"),
        ([{"role": "user", "content": datetime.date(2020, 1, 1)}], "messages[0].content"),
        ([USER, {"role": "user", "contnt": "x"}], "messages[1].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [ODD]}], "messages[0].tool_calls[0].function"),
        ([USER, 5], "messages[1]"), ([[USER], []], "messages[1]"), ([[USER], USER], "messages[1]"), ([], "messages"),
        (USER, "messages"), ("hello", "messages"), (5, "messages"), (DEEP, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        conversations(messages)
    assert caught.value.param == param
