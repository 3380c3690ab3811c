"""A batch's input is parsed alike however it is split, and errors name their line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_gateway.batches import lines as module
from pagoda_gateway.batches.lines import MAX_CUSTOM_ID_CHARS, MAX_FAULTS, Checker, Line, LineTooLong, lines_of
from pagoda_proto.errors import ErrorCode, PagodaError

URL = "/v1/chat/completions"


def known(model: str | None) -> str:
    if model not in (None, "m", "alias", "other"):
        raise PagodaError(ErrorCode.MODEL_NOT_FOUND, "no such model", "model")
    return "m" if model in (None, "alias") else str(model)


def line(**fields: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m"}} | fields
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def check(*data: bytes) -> Checker:
    checker = Checker(URL, known)
    checker.check([Line(i, each) for i, each in enumerate(data, 1)])
    checker.end()
    return checker


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def read(*data: bytes, max_bytes: int = 100) -> list[Line]:
    return [line async for lines in lines_of(pieces(*data), max_bytes) for line in lines]


@given(st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\r\n", b" ", b"\n\n"]), max_size=12), st.integers(1, 5))
@settings(max_examples=60)
async def test_lines_are_the_same_however_they_come(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    found = await read(*(data[i : i + size] for i in range(0, len(data), size)))
    assert found == [Line(i, each) for i, each in enumerate(data.split(b"\n"), 1) if each.strip()]


@pytest.mark.parametrize(
    "data", [(b"x\n" + b"y" * 101,), (b"x\n", b"y" * 60, b"y" * 60, b"\n"), (b"x\n" + b"y" * 101 + b"\nz",)]
)
async def test_a_line_that_is_too_long_is_found_before_it_is_whole(data: tuple[bytes, ...]) -> None:
    with pytest.raises(LineTooLong) as caught:
        await read(*data)
    assert caught.value.number == 2


def test_sound_lines_are_counted() -> None:
    checker = check(*(line(custom_id=f"{i}", body={"model": m} if m else {}) for i, m in enumerate(["m", "alias", ""])))
    assert (checker.faults, checker.total, checker.model) == ([], 3, "m")


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 100, "invalid_json_line", None),
        *((line(**{name: ...}), "missing_field", name) for name in ("custom_id", "method", "url", "body")),
        (line(extra=1), "unknown_field", "extra"),
        (line(custom_id=1), "invalid_field", "custom_id"),
        (line(custom_id=""), "invalid_field", "custom_id"),
        (line(custom_id="x" * (MAX_CUSTOM_ID_CHARS + 1)), "invalid_field", "custom_id"),
        (line(body=[]), "invalid_field", "body"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/completions"), "mismatched_url", "url"),
        (line(body={"model": 1}), "invalid_model", "body.model"),
        (line(body={"model": "none"}), "model_not_found", "body.model"),
        (line(body={"model": "other"}), "mismatched_model", "body.model"),
        (line(custom_id="first"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_fault_is_told_with_its_line_and_field(data: bytes, code: str, param: str | None) -> None:
    checker = check(line(custom_id="first"), data, line(custom_id="last"))
    [fault] = checker.faults
    assert (fault.code, fault.line, fault.param) == (code, 2, param)
    assert "the body" not in fault.message


def test_a_file_without_lines_is_at_fault() -> None:
    assert [fault.code for fault in check().faults] == ["empty_file"]


def test_faults_and_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = check(*[b"{"] * (MAX_FAULTS + 5))
    assert checker.full
    assert len(checker.faults) == MAX_FAULTS
    monkeypatch.setattr(module, "MAX_LINES", 3)
    checker = check(*(line(custom_id=f"{i}") for i in range(5)))
    assert checker.full
    assert [(fault.code, fault.line) for fault in checker.faults] == [("too_many_lines", 4)]
