"""Conversations given as Python objects: rejects what cannot be shown to a model, and drops nothing.

As in Hugging Face's own, the chat template judges roles and other fields of a message: tool calls need no ids, and
their arguments may be objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagoda_proto.errors import InvalidParams, Problem

MAX_PROBLEMS = 8


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """A list of messages, or several, as lists of plain objects. Raises InvalidParams, naming what is at fault."""
    try:
        given = _plain(messages)
    except RecursionError:
        raise InvalidParams([Problem("messages", "are nested too deeply, or contain themselves")]) from None
    single = isinstance(given, list) and not any(isinstance(one, list) for one in given)
    several = [given] if single else given
    problems = list(_conversation_problems(several, single))
    if problems:
        raise InvalidParams(problems[:MAX_PROBLEMS])
    return several


def _conversation_problems(several: Any, single: bool) -> Iterator[Problem]:
    if not isinstance(several, list):
        yield Problem("messages", f"must be a list of messages, or of such lists, got {type(several).__name__}")
        return
    for i, messages in enumerate(several):
        at = "messages" if single else f"messages[{i}]"
        if not isinstance(messages, list) or not messages:
            yield Problem(at, "must be a list of messages, at least one")
            continue
        for j, message in enumerate(messages):
            yield from _problems(message, f"{at}[{j}]")


def _plain(value: Any) -> Any:
    """Convert mappings, sequences and objects of client libraries to dicts and lists."""
    if callable(dump := getattr(value, "model_dump", None)):
        value = dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if _is_list(value) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _problems(message: Any, at: str) -> Iterator[Problem]:
    if not isinstance(message, dict):
        yield Problem(at, f"must be a message, got {type(message).__name__}")
        return
    if not isinstance(message.get("role"), str) or not message["role"]:
        yield Problem(f"{at}.role", "must be the name of a role")
    if "content" not in message and not message.get("tool_calls"):
        yield Problem(f"{at}.content", "is required")
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not isinstance(part, str) and not is_text:
            kind = part.get("type") if isinstance(part, dict) else part
            yield Problem(f"{at}.content[{i}]", f"must be text, or {{'type': 'text', 'text': ..}}, got {kind!r:.64}")
    if not isinstance(content, str | list | None):
        yield Problem(f"{at}.content", f"must be text or a list of parts, got {type(content).__name__}")
    yield from _call_problems(message.get("tool_calls"), f"{at}.tool_calls")


def _call_problems(calls: Any, at: str) -> Iterator[Problem]:
    if not isinstance(calls, list | None):
        yield Problem(at, f"must be a list of calls, got {type(calls).__name__}")
        return
    for i, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        told = function if isinstance(function, dict) else {}
        if not isinstance(told.get("name"), str) or not isinstance(told.get("arguments", ""), str | dict):
            yield Problem(f"{at}[{i}].function", "must have a name, and arguments as an object or as JSON text")
