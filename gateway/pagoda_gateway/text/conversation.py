"""A conversation as clients write it becomes what chat templates expect, the same for every door.

Roles and tool arguments have one form, no key is empty, and content parts stay a list where the template reads lists;
elsewhere they become one text, a line per part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda_gateway.api.json_body import parse_object
from pagoda_proto.errors import InvalidParams, PagodaError, Problem

Message = Mapping[str, Any]


def template_messages(messages: Sequence[Message], *, parts: bool) -> list[dict[str, Any]]:
    """Args:
        parts: The template reads content that is a list of parts.

    Raises:
        InvalidParams: tool arguments are no JSON object.
    """
    return [_template_message(message, i, parts) for i, message in enumerate(messages)]


def _template_message(message: Message, index: int, parts: bool) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None}
    if found.get("role") == "developer":
        found["role"] = "system"
    content = found.get("content", "")
    found["content"] = _joined(content) if isinstance(content, list | tuple) and not parts else content
    if found.get("tool_calls"):
        where = f"messages[{index}].tool_calls"
        found["tool_calls"] = [_template_call(call, f"{where}[{i}]") for i, call in enumerate(found["tool_calls"])]
    else:
        found.pop("tool_calls", None)
    return found


def _joined(content: Sequence[Any]) -> str:
    return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)


def _template_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _arguments(function["arguments"], where)
    return {"id": call["id"], "type": "function", "function": function} if "id" in call else {"function": function}


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode(errors="surrogatepass")) if text else {}
    except PagodaError as error:
        message = "must be a JSON object, as text"
        raise InvalidParams([Problem(f"{where}.function.arguments", message)]) from error


def text_size(value: Any) -> int:
    """Characters of all strings of a JSON value, keys included: what a template may show of it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + text_size(item) for key, item in value.items())
    return sum(map(text_size, value)) if isinstance(value, list | tuple) else 0
