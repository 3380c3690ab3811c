"""One form of conversation for every API, with content parts as the template expects them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.gateway.model_dir import CHAT_TEMPLATE, DEMO_MODEL

from pagoda_gateway.text.chat import ChatTemplate
from pagoda_gateway.text.conversation import Call, Turn, template_messages, text_size, turns_of
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import InvalidParams

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
READS_PARTS = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
READS_PARTS += "{{ p.text }}|{% endfor %}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        (CHAT_TEMPLATE, False),
        ("{{ messages[0].content | trim }}", False),
        ("{{ raise_exception('no') }}", False),
        (READS_PARTS.replace("|{%", "{%"), True),
        (READS_PARTS, False),  # a list of one part renders differently from its text here, so text is safer
    ],
)
def test_what_a_template_does_with_parts_is_tried(source: str, reads: bool) -> None:
    assert ChatTemplate(source, {}).reads_parts is reads


def test_parts_stay_parts_where_they_are_read() -> None:
    demo = ModelText.load(DEMO_MODEL)
    assert demo.template().reads_parts
    assert "user\nab<" in demo.render_chat([{"role": "user", "content": PARTS}])
    assert template_messages(turns_of([{"role": "user", "content": PARTS}]), parts=True)[0]["content"] == PARTS
    assert template_messages(turns_of([{"role": "user", "content": PARTS}]), parts=False)[0]["content"] == "a\nb"


def test_reasoning_is_the_templates_business() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    (found,) = template_messages(turns_of([message]), parts=False)
    assert ChatTemplate("{{ messages[0].reasoning_content }}", {}).render([found]) == "r"
    assert ChatTemplate("{{ messages[0].content }}", {}).render([found]) == "x"


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": 1, "a": 2}', "\ud800"])
def test_arguments_are_an_object(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidParams) as caught:
        template_messages(turns_of([{"role": "assistant", "tool_calls": [call]}]), parts=False)
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_all_text_counts() -> None:
    value: Any = {"a": ["bc", {"d": "e"}, 1, None], "f": ("g",)}
    assert text_size(value) == 7


def test_a_turn_of_another_api_needs_no_message() -> None:
    call = Call(id="c", name="f", arguments={"a": 1})
    turns = [Turn(role="assistant", calls=[call]), Turn(role="tool", content="2", call_id="c")]
    assert template_messages(turns, parts=False) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    assert text_size(turns) == len("assistant" + "c" + "f" + "a" + "tool" + "2" + "c")


def test_what_only_a_template_knows_of_a_message_reaches_it() -> None:
    message = {"role": "user", "content": "x", "mood": "happy", "name": None}
    assert template_messages(turns_of([message]), parts=False) == [{"role": "user", "content": "x", "mood": "happy"}]
