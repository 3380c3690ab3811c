"""What an operator can find about a refused request, and what a stranger can write into the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pagoda_gateway.api.errors import error_response
from pagoda_gateway.clients import Caller
from pagoda_gateway.http import failure_log
from pagoda_gateway.http.failure_log import FailureLog
from pagoda_proto.errors import ErrorCode, PagodaError

HOLDER = Caller("address", tenant="key")
ROUTES = frozenset({"/v1/models"})


class Told:
    """`now` is the time that the log sees."""

    def __init__(self, caplog: pytest.LogCaptureFixture, *, on: bool = True) -> None:
        caplog.set_level(logging.INFO, failure_log.logger.name)
        self._caplog = caplog
        self.now = 5.0
        self._log = FailureLog(ROUTES, on=on, now=lambda: self.now)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name == failure_log.logger.name]

    def answer(self, code: ErrorCode | None, route: str = "/v1/models", method: str = "GET", **state: Any) -> None:
        scope = {"method": method, "state": state}
        if code is not None:
            response = error_response(PagodaError(code, "what was asked: my prompt"), scope)
        self._log.answered(scope, 200 if code is None else response.status_code, "req-1", route)


def test_a_line_has_names_and_numbers(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog)
    told.answer(ErrorCode.NOT_FOUND)
    told.answer(None)
    told.answer(ErrorCode.OVERLOADED, caller=HOLDER)
    assert told.lines == [
        "failed request_id=req-1 status=404 error=not_found method=GET route=/v1/models",
        "failed request_id=req-1 status=503 error=overloaded method=GET route=/v1/models",
    ]


def test_sec_31_a_line_has_nothing_that_strangers_write(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog)
    told.answer(ErrorCode.NOT_FOUND, "/v1/models\nforged", "GET\r\nforged")
    assert told.lines == ["failed request_id=req-1 status=404 error=not_found method=other route=other"]


def test_sec_31_strangers_fill_the_log_no_faster_than_a_bound_and_take_no_line_from_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_log, "LINES_PER_MINUTE", 6)
    told = Told(caplog)
    for _ in range(50):
        told.answer(ErrorCode.INVALID_API_KEY)
        told.answer(ErrorCode.METHOD_NOT_ALLOWED, "/health", "POST", caller=Caller("address"))
    assert len(told.lines) == 6
    told.answer(ErrorCode.NOT_FOUND, caller=HOLDER)
    assert told.lines[6].endswith(" lines_left_out=94")
    told.now += 10.0
    told.answer(ErrorCode.INVALID_API_KEY)
    told.answer(ErrorCode.INVALID_API_KEY)
    assert len(told.lines) == 8
    assert "left_out" not in told.lines[7]


def test_who_wants_no_lines_has_none(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(caplog, on=False)
    told.answer(ErrorCode.NOT_FOUND)
    assert told.lines == []
