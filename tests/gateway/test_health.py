"""Readiness is what a request would find: it follows the engine core, its workers and its tokens, not the port."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator

import pytest
from tests.gateway.fake_engine_core import FakeEngineCore, running_engine, until

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.engine.waits import Waits
from pagoda_gateway.health import Health, HealthTimes, pauses_before_ready
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Generate, RequestRecord
from pagoda_proto.times import STALL_S

TIMES = HealthTimes(success_max_age_s=0.5, idle_s=0.1, canary_timeout_s=0.2, canary_spacing_s=0.02, tick_s=0.01)

# A stall of the event loop is either shorter than this or does not count.
SLOW = dataclasses.replace(TIMES, idle_s=0.3, success_max_age_s=STALL_S + 0.5)


class Watched:
    """A health with its client, and every change that it reported."""

    def __init__(self, address: str, times: HealthTimes = TIMES) -> None:
        self.metrics = GatewayMetrics("m")
        self.client = SessionClient([EngineAddress(address)], self.metrics, Waits(resume_s=1.0, tick_s=0.01))
        self.health = Health(self.client, self.metrics, times)
        self.changes: list[bool] = []
        self.client.start()
        self.health.start(self.changes.append)

    async def until_changes(self, *changes: bool) -> None:
        await until(lambda: tuple(self.changes) == changes)

    async def aclose(self) -> None:
        await self.health.aclose()
        await self.client.aclose()

    def canaries(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("pagoda_canary_requests_total", {"result": result}) or 0.0


@pytest.fixture
async def watched(address: str) -> AsyncIterator[Watched]:
    watched = Watched(address)
    yield watched
    await watched.aclose()


async def test_not_ready_without_an_engine_core(watched: Watched, address: str) -> None:
    assert "engine core is not connected" in watched.health.problems()
    assert watched.health.phase == "connecting"
    assert watched.health.dead_tasks() == []
    assert not watched.health.started
    async with running_engine(address):
        await watched.until_changes(True)
        assert watched.health.problems() == []
        assert watched.health.phase == "ready"
    await watched.until_changes(True, False)
    assert watched.health.started


def test_who_has_waited_long_waits_no_shorter_than_who_is_ready() -> None:
    times = HealthTimes()
    pauses = list(itertools.islice(pauses_before_ready(times), 1000))
    assert (pauses[0], pauses[-1]) == (times.first_tick_s, times.tick_s)
    assert all(pause <= times.first_tick_s + 0.0101 * sum(pauses[:i]) for i, pause in enumerate(pauses))
    assert list(itertools.islice(pauses_before_ready(TIMES), 2)) == [TIMES.tick_s] * 2


async def test_who_waits_for_the_first_readiness_waits_for_no_tick(address: str) -> None:
    watched = Watched(address, dataclasses.replace(TIMES, tick_s=1000.0))
    async with running_engine(address):
        await watched.until_changes(True)
    await watched.aclose()


async def test_the_canary_proves_the_ordinary_path(engine: FakeEngineCore, watched: Watched) -> None:
    await watched.until_changes(True)
    [submit] = engine.submits[:1]
    assert submit.record.generate.params.max_tokens == 1
    assert submit.record.priority > 0
    assert watched.canaries("success") >= 1
    value = watched.metrics.registry.get_sample_value
    labels = {"model_name": "m"}
    assert value("pagoda_generation_tokens_total", labels) == 0
    assert value("pagoda_e2e_request_latency_seconds_count", labels) == 0
    assert value("pagoda_request_success_total", labels | {"finished_reason": "length"}) == 0


async def test_no_worker_means_not_ready(engine: FakeEngineCore, watched: Watched) -> None:
    await watched.until_changes(True)
    engine.set_load(num_workers=0)
    await watched.until_changes(True, False)
    assert watched.health.problems() == ["no worker"]
    engine.set_load(num_workers=2)
    await watched.until_changes(True, False, True)


async def test_an_engine_core_that_yields_nothing_is_not_ready(engine: FakeEngineCore, watched: Watched) -> None:
    await watched.until_changes(True)
    engine.steps = asyncio.Semaphore(0)
    await watched.until_changes(True, False)
    assert watched.health.problems() == ["no token and no step within 0.5 s"]
    assert watched.canaries("failure") >= 1
    engine.steps = None
    await watched.until_changes(True, False, True)
    assert watched.client.num_open <= 1


async def test_canaries_that_fail_or_are_refused_do_not_make_ready(engine: FakeEngineCore, watched: Watched) -> None:
    def refuse(submit: pb.Submit) -> pb.ServerFrame:
        rejected = pb.Rejected(request_id=submit.record.request_id, code="internal_error", message="broken")
        return pb.ServerFrame(rejected=rejected)

    engine.on_submit = refuse
    await until(lambda: watched.canaries("failure") >= 3)
    assert watched.changes == []
    assert watched.health.phase == "warming_up"


async def test_no_canary_while_users_bring_tokens(engine: FakeEngineCore, address: str) -> None:
    times = dataclasses.replace(TIMES, idle_s=0.6)
    watched = Watched(address, times)
    await watched.until_changes(True)
    params = SamplingParams(max_tokens=4000)
    record = RequestRecord(request_id="user", prompt_token_ids=[1], task=Generate(params=params, seed=0))
    engine.steps = asyncio.Semaphore(0)
    generation = await watched.client.submit(record)
    before = len(engine.submits)
    until_s = time.monotonic() + 2 * times.idle_s
    while time.monotonic() < until_s:
        engine.steps.release()
        await generation.next()
        await asyncio.sleep(0.01)
    assert len(engine.submits) == before
    assert watched.changes == [True]
    await generation.aclose()
    await watched.aclose()


async def test_draining_is_unready_at_once(engine: FakeEngineCore, watched: Watched) -> None:
    await watched.until_changes(True)
    watched.health.drain()
    assert watched.changes == [True, False]
    assert "draining" in watched.health.problems()
    assert watched.health.started


async def test_a_dead_task_is_named(engine: FakeEngineCore, watched: Watched) -> None:
    await watched.client.aclose()
    assert watched.health.dead_tasks() == ["engine session", "engine clock"]
    await watched.health.aclose()
    assert watched.health.dead_tasks() == ["engine session", "engine clock", "health"]


async def step_for(engine: FakeEngineCore, seconds: float) -> None:
    """Reports loads of an engine core whose workers step, as in a long prefill, without sending a token."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        engine.set_load(num_running=1, seconds_since_progress=0.02)
        engine.set_load(num_running=1, seconds_since_progress=0.0)
        await asyncio.sleep(0.02)


async def test_a_long_prefill_is_progress_and_needs_no_canary(engine: FakeEngineCore, address: str) -> None:
    watched = Watched(address, SLOW)
    await watched.until_changes(True)
    engine.steps = asyncio.Semaphore(0)  # new requests wait behind the prefill
    await step_for(engine, 0.3)
    before = len(engine.submits)
    await step_for(engine, SLOW.success_max_age_s + 0.5)
    assert len(engine.submits) == before
    assert watched.changes == [True]
    await watched.aclose()


async def test_a_canary_that_is_overtaken_is_no_failure(engine: FakeEngineCore, address: str) -> None:
    times = dataclasses.replace(TIMES, success_max_age_s=1000.0, canary_timeout_s=0.6)
    engine.steps = asyncio.Semaphore(0)
    watched = Watched(address, times)
    await until(lambda: len(engine.submits) == 1)
    await step_for(engine, 1.0)
    assert watched.canaries("failure") == 0
    assert watched.canaries("overtaken") == 1
    await watched.aclose()


async def test_a_frozen_worker_is_unready_after_the_stated_time(engine: FakeEngineCore, address: str) -> None:
    """The engine core continues to report its load, but the steps have stopped."""
    watched = Watched(address, SLOW)
    await watched.until_changes(True)
    engine.steps = asyncio.Semaphore(0)
    await step_for(engine, 0.2)
    frozen_at = time.monotonic()
    while watched.changes == [True]:
        engine.set_load(num_running=1, seconds_since_progress=time.monotonic() - frozen_at)
        await asyncio.sleep(0.02)
        assert time.monotonic() - frozen_at < 20
    assert watched.changes == [True, False]
    assert watched.health.problems() == ["no token and no step within 1.5 s"]
    assert watched.canaries("failure") >= 1
    await watched.aclose()


async def test_a_canary_says_why_it_failed(
    engine: FakeEngineCore, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    engine.steps = asyncio.Semaphore(0)
    await until(lambda: watched.canaries("failure") >= 1)
    engine.on_submit = lambda submit: pb.ServerFrame(
        rejected=pb.Rejected(request_id=submit.record.request_id, code="overloaded", message="")
    )
    await until(lambda: "overloaded" in caplog.text)
    assert "canary failed: no token within 0.2 s" in caplog.text
    assert "canary failed: overloaded: " in caplog.text


async def test_readiness_does_not_age_while_the_gateway_sleeps(engine: FakeEngineCore, address: str) -> None:
    watched = Watched(address, SLOW)
    await watched.until_changes(True)
    time.sleep(2.5)  # noqa: ASYNC251 - the stall is what is tested
    assert watched.health.problems() == []
    await asyncio.sleep(0.1)
    assert watched.changes == [True]
    await watched.aclose()


async def test_an_engine_core_of_another_protocol_is_named(engine: FakeEngineCore, watched: Watched) -> None:
    engine.set_load(protocol=77)
    await until(lambda: watched.client.connected)
    assert any("speaks version 77" in problem for problem in watched.health.problems())
