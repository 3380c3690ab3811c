"""Every failure has its API's error format and the status of the table, and reveals nothing internal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
from tests.gateway.fakes_engine import make_gateway

from pagoda_gateway.api.error_body import ANTHROPIC_ERRORS, OPENAI_ERRORS, SILENT, openai_error, set_shape, shape_of
from pagoda_gateway.api.errors import error_response, invalid_fields
from pagoda_proto.errors import STATUS, ErrorCode, PagodaError


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_status_type_and_retry_advice(code: ErrorCode) -> None:
    response = error_response(PagodaError(code, "why", "field"), {})
    status = STATUS[code]
    error = json.loads(bytes(response.body))["error"]
    assert response.status_code == status.http
    assert (error["type"], error["code"], error["param"]) == (status.openai_type, code.value, "field")
    assert response.headers["x-should-retry"] == str(status.retryable).lower()
    assert ("retry-after" in response.headers) == (status.http == 503)


ANTHROPIC: dict[str, Any] = {"state": {"error_shape": ANTHROPIC_ERRORS, "request_id": "r"}}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_a_status_and_a_type_of_anthropics(code: ErrorCode) -> None:
    response = error_response(PagodaError(code, "why", "field"), ANTHROPIC)
    status = 529 if code is ErrorCode.OVERLOADED else STATUS[code].http
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = "field: " + ("the request failed inside the server" if code in SILENT else "why")
    assert response.status_code == status
    assert json.loads(bytes(response.body)) == {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": "r",
    }
    assert response.headers["x-should-retry"] == str(STATUS[code].retryable).lower()


def test_a_field_is_named_once_in_a_message() -> None:
    for message in ("temperature: must be lower", "must be lower"):
        body = ANTHROPIC_ERRORS.body(PagodaError(ErrorCode.INVALID_ARGUMENT, message, "temperature"), "r")
        assert body["error"]["message"] == "temperature: must be lower"


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", ANTHROPIC_ERRORS),
        ("/v1/messages/batches/x", ANTHROPIC_ERRORS),
        ("/v1/messages/", ANTHROPIC_ERRORS),
        ("/v1/messagesx", OPENAI_ERRORS),
        ("/x/v1/messages", OPENAI_ERRORS),
        ("/", OPENAI_ERRORS),
    ],
)
def test_the_path_says_whose_errors_a_request_gets(path: str, shape: object) -> None:
    scope: dict[str, Any] = {"path": path}
    set_shape(scope, {"/v1/messages": ANTHROPIC_ERRORS, "/v1/completions": OPENAI_ERRORS})
    assert shape_of(scope) is shape
    assert shape_of({}) is OPENAI_ERRORS


@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.PROTOCOL_ERROR])
def test_inner_failures_keep_their_details_for_the_log(code: ErrorCode, caplog: pytest.LogCaptureFixture) -> None:
    error = PagodaError(code, "/secret/path at 0x7f00")
    assert "secret" not in json.dumps(openai_error(error))
    error_response(error, {})
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize(("seconds", "headers"), [(0.2, ("1", "200")), (3.4, ("4", "3400")), (0.0, ("1", "1000"))])
def test_retry_headers(seconds: float, headers: tuple[str, str]) -> None:
    response = error_response(PagodaError(ErrorCode.UNAVAILABLE, "x", retry_after_s=seconds), {})
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == headers


async def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    client = make_gateway(tmp_path).client
    missing = await client.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    text: str


class Sample(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    content: str | list[Part]
    count: int = 0


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, ["content"]),
        ({"content": 1}, ["content"]),
        ({"content": [{"text": 1}]}, ["content[0].text"]),
        ({"content": [{"text": "x"}, {"txt": "x"}]}, ["content[1].text", "content[1].txt"]),
        ({"content": "x", "count": "1", "more": 1}, ["count", "more"]),
    ],
)
def test_problems_are_named_by_their_path_in_the_body(body: dict[str, object], params: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Sample.model_validate(body)
    error = invalid_fields(caught.value, body)
    assert sorted(problem.param for problem in error.problems) == params
    assert error.param in params
    assert all(problem.param in error.message for problem in error.problems)


def test_very_many_problems_are_cut_short() -> None:
    body = {"content": "x"} | {f"field_{i}": 1 for i in range(1000)}
    with pytest.raises(ValidationError) as caught:
        Sample.model_validate(body)
    assert len(invalid_fields(caught.value, body).message) < 1000
