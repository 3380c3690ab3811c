from __future__ import annotations

import grpc

from pagoda_proto.errors import STATUS, ErrorCode, InvalidParams, PagodaError, Problem


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(ErrorCode)
    for status in STATUS.values():
        assert status.grpc in grpc.StatusCode.__members__
        assert 400 <= status.http <= 599
        assert status.openai_type


def test_only_failures_of_ours_and_limits_that_pass_are_worth_a_retry() -> None:
    retryable = {code for code in ErrorCode if STATUS[code].retryable}
    assert {code for code in retryable if STATUS[code].http < 500} == {ErrorCode.RATE_LIMITED, ErrorCode.IN_PROGRESS}
    assert not STATUS[ErrorCode.REQUEST_FAILED_REPEATEDLY].retryable
    assert STATUS[ErrorCode.OVERLOADED].retryable


def test_an_error_carries_code_message_and_param() -> None:
    error = PagodaError(ErrorCode.NOT_FOUND, "no such thing", "thing")
    assert (error.code, error.message, error.param, str(error)) == (
        ErrorCode.NOT_FOUND, "no such thing", "thing", "no such thing",
    )  # fmt: skip
    assert error.status is STATUS[ErrorCode.NOT_FOUND]
    assert PagodaError(ErrorCode.INTERNAL, "x").param is None


def test_invalid_params_lists_everything_and_names_the_first() -> None:
    error = InvalidParams([Problem("", "body is not JSON"), Problem("n", "must be 1")])
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.message == "body is not JSON; n: must be 1"
    assert error.param is None
    assert error.problems[1].param == "n"
