"""However a request ends, it is counted once, under the ending that its user sees, and logged without its text."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from tests.gateway.fake_engine_core import FakeEngineCore, until
from tests.gateway.streams import collect, record, sample

from pagoda_gateway import request_ids
from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.pooled_generation import TokenTimes
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import FinishReason

LOGGER = "pagoda_gateway.generation.requests"


def ended(client: SessionClient) -> dict[str, float]:
    counts = {reason.value: sample(client, "request_success_total", finished_reason=reason) for reason in FinishReason}
    return {reason: count for reason, count in counts.items() if count}


@pytest.mark.parametrize("read_on", [False, True])
async def test_a_stop_string_is_a_stop(engine: FakeEngineCore, client: SessionClient, read_on: bool) -> None:
    """The gateway finds it, asks to abort the choice, and may leave before the engine core has answered."""
    engine.steps = asyncio.Semaphore(3)
    engine.cached_prompt_tokens = 2
    generation = await client.submit(record())
    await engine.wait_sent(3)
    await until(lambda: sample(client, "generation_tokens_total") == 3)
    await generation.abort([0])
    if read_on:
        await collect(generation)
    await generation.aclose()
    assert ended(client) == {"stop": 1}
    assert sample(client, "prompt_tokens_total") == 3
    assert sample(client, "prefix_cache_hits_total") == 2
    assert sample(client, "request_prompt_tokens_count") == 1


async def test_a_client_that_leaves_aborts(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(2)
    generation = await client.submit(record(n=2))
    await until(lambda: sample(client, "generation_tokens_total") == 4)
    await generation.abort([1])
    await generation.aclose()
    assert ended(client) == {"abort": 1}
    assert sample(client, "prompt_tokens_total") == 3


async def test_who_never_began_has_no_prompt_tokens(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(0)
    generation = await client.submit(record())
    await generation.aclose()
    assert ended(client) == {"abort": 1}
    assert sample(client, "prompt_tokens_total") == 0


async def test_one_line_per_ended_request(
    engine: FakeEngineCore, client: SessionClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine.cached_prompt_tokens = 2
    with caplog.at_level(logging.INFO, LOGGER):
        request = record()
        with request_ids.serving("of-a-client"):
            generation = await client.submit(request)
        await collect(generation)
        canary = await client.submit(record(), counted=False)
        await collect(canary)
        engine.on_submit = lambda submit: pb.ServerFrame(
            rejected=pb.Rejected(request_id=submit.record.request_id, code="overloaded")
        )
        refused = record()
        with pytest.raises(PagodaError):
            await client.submit(refused)
    first, second = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    number = r"\d+\.\d"
    assert re.fullmatch(
        rf'request id={request.request_id} request_id=of-a-client model="m" '
        rf"prompt_tokens=3 cached_tokens=2 output_tokens=12 "
        rf"ttft_ms={number} tpot_ms={number} total_ms={number} attempts=1 end=length",
        first,
    )
    assert second.startswith(f"request id={refused.request_id} request_id=- ")
    assert second.endswith("ttft_ms=- tpot_ms=- " + second.split("tpot_ms=- ")[1])
    assert second.endswith(" attempts=1 end=error:overloaded")


def test_the_pace_of_several_choices() -> None:
    times = TokenTimes(10.0)
    assert times.ttft_s is None
    assert times.tpot_s(0) is None
    assert times.on_tokens(0, 11.0) is None
    assert times.on_tokens(1, 11.0) is None
    assert times.tpot_s(2) is None
    assert times.tpot_s(9) is None  # beam search reports its sequences only at the end, so they have no pace
    assert times.on_tokens(0, 13.0) == 2.0
    assert times.on_tokens(1, 15.0) == 4.0
    assert times.ttft_s == 1.0
    assert times.tpot_s(2 + 2) == 3.0
