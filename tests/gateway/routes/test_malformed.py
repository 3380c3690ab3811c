"""The requests that bench/malformed.py sends to a running stack, except the large bodies, sent to the app alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from bench.malformed import Case, fault_of, grammars, odd_fields, schemas, texts, uploads
from tests.gateway.keys.whole_app import running_app

MAX_BYTES = 64 * 1024  # the bench measures larger ones
ALL = [case for make in (texts, schemas, grammars, uploads) for case in make()] + [*odd_fields()][::4]


async def test_every_malformed_body_is_answered_in_its_apis_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [case for case in ALL if len(case.data) <= MAX_BYTES]
    faults = []
    async with running_app(tmp_path) as app:
        for case in asked:
            answer = await app.admin.post(case.path, content=case.data, headers={"content-type": case.content_type})
            if fault := fault_of(case, answer.status_code, answer.content):
                faults.append(f"{case.path}, {case.name}: {fault}")
    assert len(asked) > 900
    assert faults == []
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("status", "content", "why"),
    [
        (500, b'{"error": {"message": "", "type": "", "param": null, "code": ""}}', "500"),
        (400, b"<html>", "no shape"),
        (400, b'{"error": {"message": "", "type": ""}, "type": "error", "request_id": ""}', "another API's"),
        (404, b'{"detail": "Not Found"}', "no shape"),
    ],
)
def test_what_is_a_fault(status: int, content: bytes, why: str) -> None:
    assert why in str(fault_of(Case("", "/v1/completions", b""), status, content))
