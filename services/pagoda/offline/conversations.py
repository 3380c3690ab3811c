"""Conversations that are given as Python objects are held to what the HTTP API takes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field, ValidationError

from pagoda_gateway.api.body import Body
from pagoda_gateway.api.schemas import Message
from pagoda_proto.errors import InvalidParams, Problem


class _Conversation(Body):
    messages: Annotated[list[Message], Field(min_length=1)]


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of one conversation, without what is None. Raises InvalidParams, naming each field at fault."""
    try:
        given = {"messages": msgspec.to_builtins(messages)}
        found = _Conversation.model_validate(given)
    except TypeError as error:
        raise InvalidParams([Problem("messages", f"must be plain objects: {error}")]) from error
    except ValidationError as error:
        from pagoda_gateway.api.errors import invalid_fields  # brings the HTTP server along

        raise invalid_fields(error, given) from error
    return [message.model_dump(exclude_none=True) for message in found.messages]
