"""Converts an API-independent conversation into what chat templates expect, the same for every API.

Roles and tool arguments have one form, and keys without a value are left out. Content parts stay a list if the template
reads lists; otherwise they become one text, a line per part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagoda_gateway.api.json_body import parse_object
from pagoda_proto.errors import InvalidParams, PagodaError, Problem

Message = Mapping[str, Any]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A past tool call. `arguments` is an object, or its JSON text."""

    name: str
    arguments: str | Mapping[str, Any]
    id: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Who said what. A part of `content` is a text or {"type": "text", "text": ..}.

    `call_id` is the id of the call whose result this is; `more` are further fields that a template may read.
    """

    role: str
    content: str | Sequence[str | Mapping[str, Any]] = ""
    reasoning: str | None = None
    calls: Sequence[Call] = ()
    call_id: str | None = None
    more: Mapping[str, Any] = {}


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Turns for the model to continue. `options` are variables that only the chat template reads."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: Mapping[str, Any] = {}


def content_of(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """A turn's content: a text, or a list of parts if there are several."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Convert messages of OpenAI's chat API. None counts as absent."""
    return [_turn({name: value for name, value in message.items() if value is not None}) for message in messages]


def _turn(message: dict[str, Any]) -> Turn:
    calls = [
        Call(id=call.get("id"), name=call["function"]["name"], arguments=call["function"].get("arguments", ""))
        for call in message.pop("tool_calls", ())
    ]
    thoughts = message.pop("reasoning", None)
    return Turn(
        role=message.pop("role", ""),
        content=message.pop("content", ""),
        reasoning=message.pop("reasoning_content", None) or thoughts,
        calls=calls,
        call_id=message.pop("tool_call_id", None),
        more=message,
    )


def template_messages(turns: Sequence[Turn], *, parts: bool) -> list[dict[str, Any]]:
    """Convert turns to messages for a chat template.

    Args:
        parts: The template reads content that is a list of parts.

    Raises:
        InvalidParams: tool arguments are not a JSON object.
    """
    return [_template_message(turn, i, parts) for i, turn in enumerate(turns)]


def _template_message(turn: Turn, index: int, parts: bool) -> dict[str, Any]:
    calls = [_template_call(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(turn.calls)]
    found = {
        "role": "system" if turn.role == "developer" else turn.role,
        "content": turn.content if parts or isinstance(turn.content, str) else _joined(turn.content),
        "reasoning_content": turn.reasoning,
        **turn.more,
        "tool_calls": calls or None,
        "tool_call_id": turn.call_id,
    }
    return {name: value for name, value in found.items() if value is not None}


def _joined(content: Sequence[str | Mapping[str, Any]]) -> str:
    return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)


def _template_call(call: Call, where: str) -> dict[str, Any]:
    arguments = _arguments(call.arguments, where) if isinstance(call.arguments, str) else call.arguments
    made = {"function": {"name": call.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, "type": "function", **made}


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode(errors="surrogatepass")) if text else {}
    except PagodaError as error:
        message = "must be a JSON object, as text"
        raise InvalidParams([Problem(f"{where}.function.arguments", message)]) from error


def text_size(value: Any) -> int:
    """Number of characters in all strings of a value, keys included: as much as a template may show of it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    if isinstance(value, Mapping):
        return sum(len(key) + text_size(item) for key, item in value.items())
    return sum(map(text_size, value)) if isinstance(value, list | tuple) else 0
