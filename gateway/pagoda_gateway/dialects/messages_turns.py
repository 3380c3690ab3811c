"""Converts Anthropic's messages to turns: consecutive messages of one side form one turn.

Tool results are in the user's messages, and are separate turns. If the last message is the assistant's, the model
continues it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pagoda_gateway.api.messages_schemas import (
    AnyBlock,
    CountTokensRequest,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from pagoda_gateway.text.conversation import Call, Chat, Turn, content_of
from pagoda_proto.errors import InvalidParams, Problem

FAILED = "Error:"  # precedes the output of a failed tool: templates have no other way to show a failure


def chat_of(body: CountTokensRequest, options: Mapping[str, Any] | None = None) -> Chat:
    """The conversation, with `options` for the chat template.

    Raises:
        InvalidParams: the last message calls tools, and has no results yet.
    """
    turns = list(_turns(body))
    unfinished = body.messages[-1].role == "assistant"
    if unfinished and turns[-1].calls:
        message = "the last one calls tools, and must be followed by a user message with their results"
        raise InvalidParams([Problem("messages", message)])
    return Chat(
        turns=turns,
        tools=[_tool(tool) for tool in body.tools_in_use],
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        options=options or {},
    )


def _turns(body: CountTokensRequest) -> Iterator[Turn]:
    for role, said in groupby(_said(body), key=lambda pair: pair[0]):
        blocks = [block for _, block in said]
        if role == "tool":
            yield from (_result(block) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            yield _turn(role, blocks)


def _said(body: CountTokensRequest) -> Iterator[tuple[str, AnyBlock]]:
    """All blocks, with the role of their turn."""
    for block in _blocks(body.system) if body.system else ():
        yield "system", block
    for message in body.messages:
        for block in _blocks(message.content):
            yield "tool" if isinstance(block, ToolResultBlock) else message.role, block


def _blocks(content: str | Sequence[AnyBlock]) -> Sequence[AnyBlock]:
    """At least one block, as an empty message is a turn too."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    return content or _blocks("")


def _turn(role: str, blocks: Sequence[AnyBlock]) -> Turn:
    texts = [block.text for block in blocks if isinstance(block, TextBlock) and block.text]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Turn(
        role=role,
        content=content_of(texts),
        reasoning="\n".join(thoughts) or None,
        calls=tuple(
            Call(id=block.id, name=block.name, arguments=block.input)
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ),
    )


def _result(block: ToolResultBlock) -> Turn:
    """A result as one text, the form that templates read."""
    content = block.content or []
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    return Turn(
        role="tool", content="\n".join([FAILED, *texts] if block.is_error else texts), call_id=block.tool_use_id
    )


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    """The tool in the form that chat templates expect."""
    about = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}
