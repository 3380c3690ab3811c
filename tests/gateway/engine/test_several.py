"""Several engine cores behind one gateway: requests are shared out, and go on elsewhere when one leaves or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fake_engine_core import FakeEngineCore, expected_tokens, running_engine, until
from tests.gateway.streams import collect, record, tokens_of, waits

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.open_request import OpenRequest
from pagoda_gateway.engine.place import SLACK, Place, choose
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_proto.records import Begun, Load

HERE = Begun(model_fingerprint="m1", numerics_id="n1", cached_prompt_tokens=0)


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[FakeEngineCore]]:
    async with running_engine(f"unix:{tmp_path}/a") as one, running_engine(f"unix:{tmp_path}/b") as other:
        yield [one, other]


@pytest.fixture
async def client(engines: list[FakeEngineCore]) -> AsyncIterator[SessionClient]:
    addresses = [EngineAddress(engine.address) for engine in engines]
    client = SessionClient(addresses, GatewayMetrics("m"), waits(resume_s=60.0))
    client.start()
    await until(lambda: client.load.num_workers == 2)
    yield client
    await client.aclose()


async def begun(engines: list[FakeEngineCore], client: SessionClient) -> list[asyncio.Task[None]]:
    """A dozen requests on both, of which each has three tokens."""
    for engine in engines:
        engine.steps = asyncio.Semaphore(0)

    async def read(number: int) -> None:
        request = record(prompt_token_ids=(number, 8, 9), n=1 + number % 2)
        deltas = await collect(await client.submit(request))
        for choice in range(request.task.params.n):
            assert tokens_of(deltas, choice) == expected_tokens(request, choice)

    reading = [asyncio.create_task(read(number)) for number in range(12)]
    await until(lambda: sum(len(engine.running) for engine in engines) == 12)
    assert all(engine.running for engine in engines)
    for engine in engines:
        for _ in range(3 * len(engine.running)):
            engine.steps.release()
    await asyncio.gather(*(engine.wait_sent(3 * len(engine.running)) for engine in engines))
    return reading


async def go_on(engines: list[FakeEngineCore], reading: list[asyncio.Task[None]]) -> None:
    for engine in engines:
        for _ in range(1000):
            engine.steps.release()  # type: ignore[union-attr]
    async with asyncio.timeout(60):
        await asyncio.gather(*reading)


@pytest.mark.parametrize("how", ["drains", "dies", "breaks", "has no worker"])
async def test_requests_go_on_at_the_other_one_at_once(
    engines: list[FakeEngineCore], client: SessionClient, how: str
) -> None:
    reading = await begun(engines, client)
    one, other = engines
    moving = len(one.running)
    if how == "drains":
        one.set_load(draining=True)
    elif how == "dies":
        await one.kill()
    elif how == "has no worker":
        one.set_load(num_workers=0)
    else:
        one.silent = True
        one.break_streams()
    await until(lambda: len([submit for submit in other.submits if submit.attempt]) == moving)
    if how in ("drains", "has no worker"):
        await until(lambda: len(one.aborts) == moving)
    await go_on(engines, reading)
    assert not client.problem
    assert client.num_open == 0


async def test_nobody_leaves_while_there_is_no_other_one(engines: list[FakeEngineCore], client: SessionClient) -> None:
    reading = await begun(engines, client)
    for engine in engines:
        engine.set_load(draining=True)
    await until(lambda: client.problem == "is draining")
    await go_on(engines, reading)
    last = engines[1].set_load  # the second to drain had nowhere to send its own
    last(draining=False)
    await until(lambda: not client.problem)


async def test_another_model_takes_nothing_over_and_ends_nothing(
    engines: list[FakeEngineCore], client: SessionClient
) -> None:
    """As long as the right one may come back."""
    one, other = engines
    reading = await begun(engines, client)
    strays = len(other.running)
    one.set_load(model_fingerprint="m2")
    await until(lambda: len([submit for submit in other.submits if submit.attempt]) == 12 - strays)
    await go_on(engines, reading)


async def test_reports_and_loads_are_those_of_all(engines: list[FakeEngineCore], client: SessionClient) -> None:
    for number, engine in enumerate(engines):
        engine.set_load(num_running=number + 1, num_waiting=1, kv_usage=number / 4, max_model_len=1000 * (number + 1))
    await until(lambda: (client.load.num_running, client.load.num_waiting) == (3, 2))
    assert (client.load.kv_usage, client.load.max_model_len) == (0.25, 1000)
    assert client.dead_tasks() == []


def place(**fields: Any) -> Place:
    made = Place(usable=True)
    made.told(Load(engine_id="e", **({"num_workers": 1, "model_fingerprint": "m1", "numerics_id": "n1"} | fields)), 0.0)
    return made


def request(begun: Begun | None = None, first: int = 1) -> OpenRequest:
    made = OpenRequest(record(prompt_token_ids=(first, 2, 3)))
    made.begun = begun
    return made


def test_it_goes_where_least_is_before_it() -> None:
    busy, idle, empty = place(num_running=20), place(num_running=2), place(num_workers=0)
    assert choose([busy, idle, empty], request(), 0) is idle
    assert choose([busy, empty], request(), 0) is busy
    assert choose([empty], request(), 0) is empty
    many = place(num_running=20, num_workers=20)
    assert choose([idle, many], request(), 0) in (idle, many)
    idle.num_open += 1 + SLACK
    assert choose([idle, many], request(), 0) is many


def test_alike_ones_go_to_the_same_place_while_it_is_not_much_busier() -> None:
    places = [place(), place()]
    chosen = [choose(places, request(first=number), 0) for number in range(32)]
    assert {id(each) for each in chosen} == {id(each) for each in places}
    assert chosen == [choose(places, request(first=number), 0) for number in range(32)]
    usual = chosen[0]
    assert isinstance(usual, Place)
    usual.num_others = SLACK
    assert choose(places, request(first=0), 0) is usual
    usual.num_others = SLACK + 1
    assert choose(places, request(first=0), 0) is not usual


def test_what_stands_in_its_way_is_final_only_when_nobody_else_may_come() -> None:
    right, wrong = place(), place(model_fingerprint="m2")
    assert choose([right, wrong], request(HERE), 0) is right
    right.usable = False
    obstacle = choose([right, wrong], request(HERE), 0)
    assert obstacle is not None
    assert not isinstance(obstacle, Place)
    assert not obstacle.final
    alone = choose([wrong], request(HERE), 0)
    assert alone is not None
    assert not isinstance(alone, Place)
    assert alone.final
    assert choose([Place()], request(HERE), 0) is None
