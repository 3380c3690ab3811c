"""Error bodies in the shape of each API; the messages are the same in all of them.

A request's path alone determines its API, so even a request that is refused unread gets that API's error format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from pagoda_gateway.api.answer_schemas import ErrorAnswer, Failure, MessagesErrorAnswer
from pagoda_gateway.keys.quota_headers import QuotaHeaders, anthropic_quota_headers, openai_quota_headers
from pagoda_proto.errors import ErrorCode, PagodaError

SILENT = frozenset({ErrorCode.INTERNAL, ErrorCode.PROTOCOL_ERROR})  # their messages are only for the log
OVERLOADED_STATUS = 529
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}


@dataclass(frozen=True, kw_only=True)
class ErrorShape:
    """`body` builds the error object from the error and the request's id, for a response or an event named `event`.

    `quota_headers` are sent with every answer to a caller that has limits, so that it can foresee a refusal.
    """

    status: Callable[[PagodaError], int]
    body: Callable[[PagodaError, str], dict[str, Any]]
    schema: type[Failure]
    event: str | None = None
    quota_headers: QuotaHeaders = openai_quota_headers


def openai_error(error: PagodaError, request_id: str = "") -> dict[str, Any]:
    kind, code = error.status.openai_type, error.code.value
    return {"error": {"message": told(error), "type": kind, "param": error.param, "code": code}}


def anthropic_status(error: PagodaError) -> int:
    return OVERLOADED_STATUS if error.code is ErrorCode.OVERLOADED else error.status.http


def anthropic_error(error: PagodaError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object has no field for `param`, so the message names it."""
    status, message = anthropic_status(error), told(error)
    if error.param is not None and not message.startswith(f"{error.param}:"):
        message = f"{error.param}: {message}"
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def told(error: PagodaError) -> str:
    return "the request failed inside the server" if error.code in SILENT else error.message


OPENAI_ERRORS = ErrorShape(status=lambda error: error.status.http, body=openai_error, schema=ErrorAnswer)
ANTHROPIC_ERRORS = ErrorShape(
    status=anthropic_status,
    body=anthropic_error,
    schema=MessagesErrorAnswer,
    event="error",
    quota_headers=anthropic_quota_headers,
)


def set_shape(scope: MutableMapping[str, Any], shapes: Mapping[str, ErrorShape]) -> None:
    """Set the shape by path: `shapes` are keyed by paths, and hold for paths below them too. `scope` is ASGI's."""
    path = scope["path"] + "/"
    found = (shape for place, shape in shapes.items() if path.startswith(place + "/"))
    set_shape_of(scope, next(found, OPENAI_ERRORS))


def set_shape_of(scope: MutableMapping[str, Any], shape: ErrorShape) -> None:
    """Set the shape if the path does not determine it."""
    scope.setdefault("state", {})["error_shape"] = shape


def shape_of(scope: Mapping[str, Any]) -> ErrorShape:
    """The shape that `set_shape` has set; OpenAI's by default."""
    shape: ErrorShape = scope.get("state", {}).get("error_shape", OPENAI_ERRORS)
    return shape
