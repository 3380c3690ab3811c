"""Refused requests with an Idempotency-Key, and what may be requested under the key afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import failing, play
from tests.gateway.tickets.test_tickets import ASK, CHAT, TEXT, WHOLE, code_of, post, running, text_of

from pagoda_proto.errors import ErrorCode


async def test_what_was_refused_for_what_it_asks_may_be_mended(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        gateway.engine.script = failing(ErrorCode.INVALID_ARGUMENT)
        assert code_of(await post(gateway, WHOLE)) == (400, "invalid_argument")
        gateway.engine.script = play(gateway.ids(TEXT))
        assert (await post(gateway, WHOLE | {"seed": 1})).status_code == 200


async def test_what_was_refused_for_now_is_run_the_next_time(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        gateway.engine.script = failing(ErrorCode.OVERLOADED)
        assert code_of(await post(gateway, ASK)) == (503, "overloaded")
        gateway.engine.script = play(gateway.ids(TEXT))
        assert text_of((await post(gateway, ASK)).text) == TEXT


@pytest.mark.parametrize(
    ("headers", "body", "named"),
    [
        ({"Idempotency-Key": ""}, ASK, "Idempotency-Key"),
        ({"Idempotency-Key": "x" * 256}, ASK, "Idempotency-Key"),
        ({"Idempotency-Key": "a b"}, ASK, "Idempotency-Key"),
        ({"Last-Event-ID": "x"}, ASK, "Last-Event-ID"),
        ({"Idempotency-Key": "k", "Last-Event-ID": "x"}, ASK, "Last-Event-ID"),
        ({"Idempotency-Key": "k", "Last-Event-ID": "stream_1:00000000:0:1.1"}, ASK, "Last-Event-ID"),
        ({"Idempotency-Key": "k", "Last-Event-ID": "stream_1:00000000:0:1.1"}, WHOLE, "Last-Event-ID"),
    ],
)
async def test_headers_that_say_nothing_are_refused(
    tmp_path: Path, headers: dict[str, str], body: dict[str, Any], named: str
) -> None:
    async with running(tmp_path) as gateway:
        response = await gateway.client.post(CHAT, json=body, headers=headers)
        assert (code_of(response), response.json()["error"]["param"]) == ((400, "invalid_argument"), named)
