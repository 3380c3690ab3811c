"""Turns any failure into one error object; its message is for the client and reveals no internals."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from pagoda_gateway.api.encoding import encoded
from pagoda_gateway.api.error_body import SILENT, shape_of
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 8
MAX_EXAMINED = 64
MAX_SHOWN_CHARS = 48
FAILURE = "failure"  # in a request's state: the error code of its answer


def error_response(error: PagodaError, scope: Mapping[str, Any]) -> Response:
    """Status, error object, and the headers that control clients' retries. `scope` is the request's, {} before there
    is one.
    """
    shape = shape_of(scope)
    headers = {"x-should-retry": "true" if error.status.retryable else "false"}
    retry_after_s = error.retry_after_s or (1.0 if error.status.http == 503 else 0.0)
    if retry_after_s > 0 and error.status.retryable:
        headers["retry-after"] = str(math.ceil(retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(retry_after_s * 1000))
    if error.status.http == 401:
        headers["www-authenticate"] = "Bearer"
    if "state" in scope:
        scope["state"][FAILURE] = error.code
    if error.code in SILENT:
        logger.error("request %s failed: %s: %s", request_id_of(scope) or "without id", error.code, error.message)
    body = encoded(shape.body(error, request_id_of(scope)))
    return Response(body, status_code=shape.status(error), headers=headers, media_type="application/json")


def request_id_of(scope: Mapping[str, Any]) -> str:
    """The id that the app's edge has given it; "" if none."""
    request_id: str = scope.get("state", {}).get("request_id", "")
    return request_id


def install(app: FastAPI) -> None:
    """Make every failure of a handler end in `error_response`."""

    async def answer(request: Request, error: Exception) -> Response:
        response = error_response(_failure(request, error), request.scope)
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    for kind in (PagodaError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _failure(request: Request, error: Exception) -> PagodaError:
    match error:
        case PagodaError():
            return error
        case RequestValidationError():
            return _invalid([_problem(item, None) for item in error.errors()])
        case HTTPException():
            return _from_http(error, request)
        case _:
            return internal(error, request.scope)


def internal(error: Exception, scope: Scope) -> PagodaError:
    """A bug: the client gets only an id, by which the traceback can be found in the log."""
    error_id = request_id_of(scope) or secrets.token_hex(8)
    logger.error("request %s: unexpected %s", error_id, type(error).__name__, exc_info=error)
    return PagodaError(ErrorCode.INTERNAL, f"see the log of request {error_id}")


def _from_http(error: HTTPException, request: Request) -> PagodaError:
    if error.status_code == 404:
        return PagodaError(ErrorCode.NOT_FOUND, "there is no such endpoint")
    if error.status_code == 405:
        return PagodaError(ErrorCode.METHOD_NOT_ALLOWED, f"this endpoint does not take {request.method}")
    if error.status_code == 413:
        return PagodaError(ErrorCode.REQUEST_TOO_LARGE, "the request body is too large")
    if error.status_code < 500:
        return PagodaError(ErrorCode.INVALID_ARGUMENT, str(error.detail))
    return PagodaError(ErrorCode.INTERNAL, str(error.detail))


def invalid_fields(error: ValidationError, body: Any) -> InvalidParams:
    """The problems that pydantic found in `body`, each with its path in the request, such as messages[0].content."""
    return _invalid([_problem(item, body) for item in error.errors(include_url=False)])


def _invalid(problems: list[Problem]) -> InvalidParams:
    """Pydantic reports problems of every alternative of a union: keep the deepest ones, and one per place."""
    first = {problem.param: problem for problem in reversed(problems[:MAX_EXAMINED])}
    shallow = {param for param in first for other in first if other.startswith((f"{param}.", f"{param}["))}
    kept = [problem for param, problem in first.items() if param not in shallow]
    return InvalidParams(kept[::-1][:MAX_PROBLEMS])


def _problem(item: ErrorDetails, body: Any) -> Problem:
    return Problem(_path(item["loc"], body, item["type"] == "missing"), _explain(item))


def _explain(item: ErrorDetails) -> str:
    match item["type"]:
        case "extra_forbidden":
            return "is not a known field"
        case "missing":
            return "is required"
        case "none_required":
            return f"is not supported{_shown(item['input'])}"
        case "literal_error":
            expected = item["ctx"]["expected"]
            return f"must be {expected}; other values are not supported{_shown(item['input'])}"
        case "value_error":
            return str(item["ctx"]["error"])
        case _:
            return item["msg"][:1].lower() + item["msg"][1:] + _shown(item["input"])


def _shown(value: Any) -> str:
    """The offending value, if it is short."""
    if isinstance(value, str):
        return f", got {value[:MAX_SHOWN_CHARS]!a}{'..' if len(value) > MAX_SHOWN_CHARS else ''}"
    if value is None or isinstance(value, bool | int | float):
        return f", got {json.dumps(value)[:MAX_SHOWN_CHARS]}"
    return ""


def _path(loc: tuple[int | str, ...], body: Any, missing: bool) -> str:
    """pydantic's location without the names of union branches: only steps that exist in the body itself, and the name
    of a `missing` field."""
    path = ""
    for i, step in enumerate(loc):
        last = missing and i == len(loc) - 1
        if isinstance(step, int):
            path += f"[{step}]"
            body = body[step] if isinstance(body, list) and step < len(body) else None
        elif (isinstance(body, dict) and (step in body or last)) or body is None:
            path += f".{step[:64]}" if path else step[:64]
            body = body.get(step) if isinstance(body, dict) else None
    return path
