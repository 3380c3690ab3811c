"""Every failure has OpenAI's shape, the status of the table, and nothing inside that is not for the client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
from tests.gateway.fakes_engine import make_gateway

from pagoda_gateway.api.error_body import openai_error
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
