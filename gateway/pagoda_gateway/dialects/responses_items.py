"""Turns the items of a response's input into turns: consecutive items of the assistant form one turn.

Its reasoning, text and calls are one turn; each result of a call, and each message of others, is a turn of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from pagoda_gateway.api.json_body import parse_object
from pagoda_gateway.api.responses_schemas import (
    Content,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from pagoda_gateway.text.conversation import Call, Turn, content_of
from pagoda_proto.errors import InvalidParams, PagodaError, Problem

ASSISTANT = "assistant"


def turns_of(instructions: str | None, items: Sequence[Item]) -> Iterator[Turn]:
    if instructions:
        yield Turn(role="system", content=instructions)
    for role, said in groupby(items, key=_role):
        if role == ASSISTANT:
            yield from _own_turns(said)
        else:
            yield from (_turn_of_other(role, item) for item in said)


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """A plain text is a message of the user."""
    return [MessageItem.model_validate({"role": "user", "content": given})] if isinstance(given, str) else list(given)


def template_tool(tool: FunctionTool) -> dict[str, Any]:
    """The tool in the form that chat templates expect."""
    function = tool.model_dump(exclude_none=True, exclude={"type", "strict"})
    return {"type": "function", "function": function}


def _role(item: Item) -> str:
    match item:
        case MessageItem():
            return item.role
        case FunctionOutputItem():
            return "tool"
    return ASSISTANT


def _turn_of_other(role: str, item: Item) -> Turn:
    match item:
        case FunctionOutputItem():
            return Turn(role=role, content="\n".join(_texts(item.output)), call_id=item.call_id)
        case MessageItem():
            return Turn(role=role, content=content_of(_texts(item.content)))
    raise AssertionError(item)


def _own_turns(said: Iterable[Item]) -> Iterator[Turn]:
    """One turn, or several if it goes on after calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    for item in said:
        if calls and not isinstance(item, FunctionCallItem):
            yield _own_turn(texts, thoughts, calls)
            texts, thoughts, calls = [], [], []
        match item:
            case ReasoningItem():
                thoughts += [part.text for part in item.content or item.summary]
            case FunctionCallItem():
                calls.append(Call(id=item.call_id, name=item.name, arguments=_arguments(item)))
            case MessageItem():
                texts += _texts(item.content)
    yield _own_turn(texts, thoughts, calls)


def _own_turn(texts: list[str], thoughts: list[str], calls: list[Call]) -> Turn:
    return Turn(role=ASSISTANT, content=content_of(texts), reasoning="\n".join(thoughts) or None, calls=tuple(calls))


def _arguments(call: FunctionCallItem) -> dict[str, Any]:
    try:
        return parse_object(call.arguments.encode(errors="surrogatepass")) if call.arguments else {}
    except PagodaError as error:
        message = f"the arguments of call {call.call_id!a} must be a JSON object, as text"
        raise InvalidParams([Problem("input", message)]) from error


def _texts(content: Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.text if isinstance(part, InputText | OutputText) else part.refusal for part in content]
