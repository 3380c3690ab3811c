"""Anthropic's messages as conversation turns, and what the model sees of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.model_dir import CHAT_TEMPLATE, DEMO_MODEL, write_model_dir

from pagoda_gateway.api.messages_schemas import CountTokensRequest
from pagoda_gateway.dialects.messages_turns import chat_of
from pagoda_gateway.routes.body import parse_body
from pagoda_gateway.text.conversation import Call, Chat, Turn
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import InvalidParams

THINKS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}",
)


def chat(*messages: tuple[str, Any], **fields: Any) -> Chat:
    said = [{"role": role, "content": content} for role, content in messages]
    return chat_of(CountTokensRequest.model_validate({"model": "m", "messages": said, **fields}))


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(call_id: str = "t1") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": {"a": 1}}


def result(content: Any, call_id: str = "t1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_a_turn_is_what_one_side_says_up_to_the_other() -> None:
    found = chat(("user", "a"), ("user", [text("b"), text("c")]), ("assistant", "d"), ("user", "e"))
    assert found.turns == [
        Turn(role="user", content=[text("a"), text("b"), text("c")]),
        Turn(role="assistant", content="d"),
        Turn(role="user", content="e"),
    ]
    assert (found.add_generation_prompt, found.continue_final_message) == (True, False)


@pytest.mark.parametrize("system", ["be brief", [text("be brief")]])
def test_the_system_speaks_first(system: Any) -> None:
    first, second = chat(("user", "a"), system=system).turns
    assert (first, second) == (Turn(role="system", content="be brief"), Turn(role="user", content="a"))


def test_a_system_message_joins_the_system_or_stands_where_it_is() -> None:
    found = chat(("system", "two"), ("user", "a"), ("system", "three"), ("user", "b"), system="one")
    assert [(turn.role, turn.content) for turn in found.turns] == [
        ("system", [text("one"), text("two")]), ("user", "a"), ("system", "three"), ("user", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize("system", ["", []])
def test_an_empty_system_is_none(system: Any) -> None:
    assert [turn.role for turn in chat(("user", "a"), system=system).turns] == ["user"]


def test_calls_thoughts_and_results() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    found = chat(
        ("user", "add"),
        ("assistant", [thought, text("ok"), use("t1"), use("t2")]),
        ("user", [result("3"), result([text("4"), text("5")], "t2"), text("and?")]),
    )
    call = Call(name="add", arguments={"a": 1}, id="t1")
    assert found.turns[1:] == [
        Turn(
            role="assistant", content="ok", reasoning="hm", calls=(call, Call(name="add", arguments={"a": 1}, id="t2"))
        ),
        Turn(role="tool", content="3", call_id="t1"),
        Turn(role="tool", content="4\n5", call_id="t2"),
        Turn(role="user", content="and?"),
    ]


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        ("no file", {"is_error": True}, "Error:\nno file"),
        ("no file", {"is_error": False}, "no file"),
        (None, {}, ""),
        ([], {"is_error": True}, "Error:"),
    ],
)
def test_a_failed_tool_is_told_to_the_model(content: Any, fields: dict[str, Any], said: str) -> None:
    *_, last = chat(("user", "add"), ("assistant", [use()]), ("user", [result(content, **fields)])).turns
    assert last == Turn(role="tool", content=said, call_id="t1")


def model(root: Path, template: str = CHAT_TEMPLATE) -> ModelText:
    return ModelText.load(write_model_dir(root, tokenizer_config={"chat_template": template}))


@pytest.mark.parametrize("content", ["well,", [text("well,")], []])
def test_where_the_assistant_spoke_last_the_model_goes_on(tmp_path: Path, content: Any) -> None:
    found = model(tmp_path).render_marked(chat(("user", "a"), ("assistant", content)))
    assert found.endswith("<|im_start|>assistant\n" + ("well," if content else ""))


def test_it_goes_on_with_parts_too_where_the_template_reads_them() -> None:
    demo = ModelText.load(DEMO_MODEL)
    assert demo.template().reads_parts
    found = demo.render_marked(chat(("user", "a"), ("assistant", [text("well,"), text(" then")])))
    assert found.endswith("<|im_start|>assistant\nwell, then")


def test_nobody_is_to_speak_while_a_call_has_no_result() -> None:
    with pytest.raises(InvalidParams, match="results") as caught:
        chat(("user", "a"), ("assistant", [use()]))
    assert caught.value.param == "messages"


def test_thoughts_are_shown_where_the_template_shows_them(tmp_path: Path) -> None:
    said = chat(("user", "a"), ("assistant", [{"type": "thinking", "thinking": "hm"}, text("b")]), ("user", "c"))
    assert "assistant\n(hm)b<" in model(tmp_path, THINKS).render_marked(said)
    assert "assistant\nb<" in model(tmp_path).render_marked(said)


def test_a_template_sees_openais_names(tmp_path: Path) -> None:
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    found = chat(("user", "a"), ("assistant", [use()]), ("user", [result("3")]), tools=tools)
    assert found.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert '{"name": "add", "arguments": {"a": 1}}' in model(tmp_path).render_marked(found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(["text", "thinking", "signature", "id", "name", "input", "tool_use_id", "content", "is_error"])
KINDS = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])
ANY_BLOCK = st.builds(
    lambda kind, block: block | {"type": kind}, KINDS, st.dictionaries(KEYS, JSON | st.just("x"), max_size=4)
) | st.sampled_from([text("a"), use(), result("3"), result([text("4")])])


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.lists(ANY_BLOCK, max_size=3)), min_size=1))
def test_any_blocks_are_a_chat_or_a_refusal_that_names_a_message(said: list[tuple[str, list[Any]]]) -> None:
    body = {"model": "m", "messages": [{"role": role, "content": blocks} for role, blocks in said]}
    refused: str | None = None
    try:
        found = chat_of(parse_body(CountTokensRequest, body))
    except InvalidParams as error:
        refused = error.param or ""
    if refused is not None:
        assert refused.startswith("messages")
        return
    assert found.continue_final_message == (said[-1][0] == "assistant")
    assert not (found.continue_final_message and found.turns[-1].calls)
    assert found.continue_final_message == (found.turns[-1].role == "assistant")


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.lists(st.text(max_size=3))), min_size=1))
def test_how_texts_are_cut_into_messages_makes_no_difference(said: list[tuple[str, list[str]]]) -> None:
    """Each block in its own message, or all blocks of a turn in one: the turns are equal, and roles alternate."""
    whole = [(role, [text(value) for value in texts] or [text("")]) for role, texts in said]
    found = chat(*whole)
    assert found == chat(*((role, [block]) for role, blocks in whole for block in blocks))
    roles = [turn.role for turn in found.turns]
    assert all(one != other for one, other in itertools.pairwise(roles))
    shown = [
        value for turn in found.turns for value in ([turn.content] if isinstance(turn.content, str) else turn.content)
    ]
    assert [part if isinstance(part, str) else part["text"] for part in shown if part] == [
        value for _, texts in said for value in texts if value
    ]
