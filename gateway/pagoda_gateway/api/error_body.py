"""What a client is told of a failure, in its API's shape; the words are the same in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagoda_proto.errors import ErrorCode, PagodaError

ErrorShape = Callable[[PagodaError], dict[str, Any]]
SILENT = frozenset({ErrorCode.INTERNAL, ErrorCode.PROTOCOL_ERROR})  # what they say is for the log


def openai_error(error: PagodaError) -> dict[str, Any]:
    """For a body or an event."""
    kind, code = error.status.openai_type, error.code.value
    return {"error": {"message": told(error), "type": kind, "param": error.param, "code": code}}


def told(error: PagodaError) -> str:
    return "the request failed inside the server" if error.code in SILENT else error.message
