"""The input items of a response as conversation turns."""

from __future__ import annotations

from typing import Any

from pagoda_gateway.api.responses_schemas import read_items
from pagoda_gateway.dialects.responses_items import turns_of
from pagoda_gateway.text.conversation import Call, Turn

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "two"}


def turns(*items: dict[str, Any], instructions: str | None = None) -> list[Turn]:
    return list(turns_of(instructions, read_items(list(items))))


def test_instructions_come_first() -> None:
    assert turns({"role": "user", "content": "hi"}, instructions="be brief") == [
        Turn(role="system", content="be brief"),
        Turn(role="user", content="hi"),
    ]


def test_what_the_assistant_thought_said_and_called_is_one_turn() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]}
    call = Call(id="c1", name="f", arguments={"a": 1})
    assert turns(thought, said, CALL, RESULT) == [
        Turn(role="assistant", content="let me see", reasoning="hm", calls=(call,)),
        Turn(role="tool", content="two", call_id="c1"),
    ]


def test_calls_in_a_row_are_one_turn_and_words_after_them_another() -> None:
    said = {"role": "assistant", "content": "done"}
    found = turns(CALL, CALL | {"call_id": "c2"}, said)
    assert [(turn.content, [call.id for call in turn.calls]) for turn in found] == [("", ["c1", "c2"]), ("done", [])]


def test_each_message_of_another_is_a_turn_and_parts_stay_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    found = turns(
        {"role": "user", "content": parts}, {"role": "user", "content": "c"}, {"role": "developer", "content": "d"}
    )
    assert [turn.role for turn in found] == ["user", "user", "developer"]
    assert found[0].content == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_a_refusal_is_what_was_said() -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert turns(said)[0].content == "no"
