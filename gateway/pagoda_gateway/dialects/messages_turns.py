"""Anthropic's messages as turns: a turn is what one side says up to the other's, in however many messages.

Results of tools stand in messages of the user, and are turns of their own. Where the assistant was the last to speak,
the model goes on with that.
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

FAILED = "Error:"  # stands before what a tool said of its failure: templates have no other way to tell


def chat_of(body: CountTokensRequest, options: Mapping[str, Any] | None = None) -> Chat:
    """With `options` for the chat template.

    Raises:
        InvalidParams: a call has no result yet, so nobody is to speak.
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
    """Blocks with the role of their turn."""
    for block in _blocks(body.system) if body.system else ():
        yield "system", block
    for message in body.messages:
        for block in _blocks(message.content):
            yield "tool" if isinstance(block, ToolResultBlock) else message.role, block


def _blocks(content: str | Sequence[AnyBlock]) -> Sequence[AnyBlock]:
    """One at least, as who says nothing has had a turn."""
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
    """One text, as templates read results so."""
    content = block.content or []
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    return Turn(
        role="tool", content="\n".join([FAILED, *texts] if block.is_error else texts), call_id=block.tool_use_id
    )


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    """As chat templates know tools."""
    about = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}
