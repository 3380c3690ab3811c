"""What a message's body says about tool calls and reasoning, translated into API-independent types."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from pagoda_gateway.api.messages_schemas import CountTokensRequest, MessagesRequest
from pagoda_gateway.generation.answers import check_budget
from pagoda_gateway.text.answers import Calling, Demand, Wanted
from pagoda_gateway.text.chat import thinking_switch
from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.text.tool_formats.functions import Function


def calling_of(body: MessagesRequest) -> Calling | None:
    """None if no tools may be called."""
    if not body.tools_in_use:
        return None
    choice = body.tool_choice
    named = None if choice is None else choice.name
    return Calling(
        functions=tuple(
            Function(name=tool.name, parameters=tool.input_schema, strict=bool(tool.strict))
            for tool in body.tools_in_use
            if named in (None, tool.name)
        ),
        demand=Demand.AUTO if choice is None or choice.type == "auto" else Demand.REQUIRED,
        several=choice is None or not (choice.disable_parallel_tool_use or named),
    )


def wanted_of(body: MessagesRequest, text: ModelText) -> Wanted:
    """What the answer may contain. Raises InvalidParams."""
    asked = body.thinking
    budget = None if asked is None else asked.budget_tokens
    if budget is not None:
        check_budget(text.formats, "thinking.budget_tokens")
    silent = asked is not None and asked.type == "disabled"
    return Wanted(calling=calling_of(body), budget=budget, thinks=False if silent else None)


def thinking_options(body: CountTokensRequest, read: AbstractSet[str]) -> dict[str, Any]:
    """The chat template's option for thinking, if it has one; `read` are the variables that it reads."""
    switch = thinking_switch(frozenset(read))
    if not switch or body.thinking is None or body.thinking.type == "adaptive":
        return {}
    return {switch: body.thinking.type == "enabled"}
