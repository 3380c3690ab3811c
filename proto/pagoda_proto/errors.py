"""Every failure that a client can see has one code, and one table maps codes to statuses.

    PagodaError            carries (code, message, param); raised anywhere, translated once at each border
      └─ InvalidParams     several problems found at once, each naming its field

Engine core and worker use codes. gRPC carries them as status and `pagoda-code` trailer, HTTP as status and an error
object in the format of the client's API, which may map a code to a different status.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class ErrorCode(StrEnum):
    INVALID_ARGUMENT = "invalid_argument"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    FORBIDDEN = "insufficient_permissions"
    RATE_LIMITED = "rate_limit_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    IN_PROGRESS = "request_in_progress"
    KEY_REUSED = "idempotency_key_reused"
    REQUEST_TOO_LARGE = "request_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    CANCELLED = "cancelled"
    STREAM_INTERRUPTED = "stream_interrupted"
    REQUEST_FAILED_REPEATEDLY = "request_failed_repeatedly"
    NUMERICAL_ERROR = "numerical_error"
    PROTOCOL_ERROR = "protocol_error"
    INTERNAL = "internal_error"


def error_code_from(name: str) -> ErrorCode | None:
    """The code with this name; INTERNAL for one from another version, None for an empty name."""
    try:
        return ErrorCode(name) if name else None
    except ValueError:
        return ErrorCode.INTERNAL


class Status(NamedTuple):
    """How a code appears to clients: gRPC status name, HTTP status, OpenAI error type; and whether a retry may help."""

    grpc: str
    http: int
    openai_type: str
    retryable: bool


STATUS: dict[ErrorCode, Status] = {
    ErrorCode.INVALID_ARGUMENT: Status("INVALID_ARGUMENT", 400, "invalid_request_error", False),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Status("INVALID_ARGUMENT", 400, "invalid_request_error", False),
    ErrorCode.INVALID_API_KEY: Status("UNAUTHENTICATED", 401, "authentication_error", False),
    ErrorCode.FORBIDDEN: Status("PERMISSION_DENIED", 403, "permission_error", False),
    ErrorCode.RATE_LIMITED: Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error", True),
    ErrorCode.MODEL_NOT_FOUND: Status("NOT_FOUND", 404, "invalid_request_error", False),
    ErrorCode.NOT_FOUND: Status("NOT_FOUND", 404, "invalid_request_error", False),
    ErrorCode.METHOD_NOT_ALLOWED: Status("UNIMPLEMENTED", 405, "invalid_request_error", False),
    ErrorCode.IN_PROGRESS: Status("ABORTED", 409, "invalid_request_error", True),
    ErrorCode.KEY_REUSED: Status("INVALID_ARGUMENT", 422, "invalid_request_error", False),
    ErrorCode.REQUEST_TOO_LARGE: Status("RESOURCE_EXHAUSTED", 413, "invalid_request_error", False),
    ErrorCode.HEADERS_TOO_LARGE: Status("RESOURCE_EXHAUSTED", 431, "invalid_request_error", False),
    ErrorCode.REQUEST_TIMEOUT: Status("DEADLINE_EXCEEDED", 408, "invalid_request_error", False),
    ErrorCode.DEADLINE_EXCEEDED: Status("DEADLINE_EXCEEDED", 504, "timeout_error", False),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: Status("INVALID_ARGUMENT", 415, "invalid_request_error", False),
    ErrorCode.OVERLOADED: Status("RESOURCE_EXHAUSTED", 503, "overloaded_error", True),
    ErrorCode.UNAVAILABLE: Status("UNAVAILABLE", 503, "service_unavailable_error", True),
    ErrorCode.ADAPTER_UNAVAILABLE: Status("UNAVAILABLE", 503, "service_unavailable_error", True),
    ErrorCode.CANCELLED: Status("CANCELLED", 499, "cancelled", False),
    ErrorCode.STREAM_INTERRUPTED: Status("ABORTED", 503, "service_unavailable_error", True),
    ErrorCode.REQUEST_FAILED_REPEATEDLY: Status("ABORTED", 500, "server_error", False),
    ErrorCode.NUMERICAL_ERROR: Status("INTERNAL", 500, "server_error", False),
    ErrorCode.PROTOCOL_ERROR: Status("INTERNAL", 500, "server_error", False),
    ErrorCode.INTERNAL: Status("INTERNAL", 500, "server_error", True),
}


class Problem(NamedTuple):
    """One thing wrong with one field; the message states the rule and the offending value."""

    param: str
    message: str


class PagodaError(Exception):
    """A failure with a code. `param` names the request field at fault, if there is one.

    `retry_after_s` is after how long a retry may help; 0 means unknown.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> Status:
        return STATUS[self.code]

    def anew(self, retry_after_s: float = 0.0) -> PagodaError:
        """A copy of this failure. A stored exception must be copied to be raised again: each raise adds frames to it,
        which keep their objects alive."""
        return PagodaError(self.code, self.message, self.param, retry_after_s or self.retry_after_s)


class InvalidParams(PagodaError):
    """All problems of a request at once, so that a client can fix them in one go."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        message = "; ".join(f"{p.param}: {p.message}" if p.param else p.message for p in problems)
        super().__init__(ErrorCode.INVALID_ARGUMENT, message, problems[0].param or None)
        self.problems = tuple(problems)
