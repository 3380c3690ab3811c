"""Each reader of an answer has its own deadline; the answer itself has none."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.gateway.fakes_engine import held_up
from tests.gateway.tickets.test_tickets import ASK, CHAT, TEXT, WHOLE, running, text_of

from pagoda_gateway.generation.job import Job
from pagoda_gateway.store.tickets import JOBS


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_no_more_time_is_answered_when_it_asks_again(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as gateway:
        go, body, named = held_up(gateway), ASK if stream else WHOLE, {"Idempotency-Key": "k"}
        late = await gateway.client.post(CHAT, json=body, headers=named | {"Request-Timeout-Ms": "200"})
        told = late.text.split("\n\n")[-2].partition("data: ")[2] if stream else late.text
        assert (late.status_code, json.loads(told)["error"]["code"]) == (200 if stream else 504, "deadline_exceeded")
        go.set()
        for patience in ({}, {"Request-Timeout-Ms": "86400000"}):  # while it runs, and after it is kept
            again = await gateway.client.post(CHAT, json=body, headers=named | patience)
            assert again.status_code == 200
            assert again.headers["idempotent-replayed"] == "true"
            text = text_of(again.text) if stream else again.json()["choices"][0]["message"]["content"]
            assert text == TEXT
        assert len(gateway.engine.generations) == 1


async def test_who_reads_along_has_a_time_of_its_own(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        held_up(gateway, num_batches=0)
        for _ in range(2):
            named = {"Idempotency-Key": "k", "Request-Timeout-Ms": "100"}
            late = await gateway.client.post(CHAT, json=WHOLE, headers=named)
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_the_first_ones_time_is_not_that_of_those_who_ask_later(tmp_path: Path) -> None:
    """Neither the run nor the job kept for another run has that deadline."""
    async with running(tmp_path) as gateway:
        go, named = held_up(gateway, num_batches=0), {"Idempotency-Key": "k"}
        await gateway.client.post(CHAT, json=WHOLE, headers=named | {"Request-Timeout-Ms": "100"})
        kept = (await gateway.context.store.page(JOBS, "", limit=2)).records
        asked = [generation.record for generation in gateway.engine.generations]
        asked += msgspec.json.decode(kept[0].value, type=Job).records
        assert [record.queue_timeout_s for record in asked] == [0.0, 0.0]
        go.set()
