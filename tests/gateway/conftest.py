"""A fake engine core, and real clients connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.gateway.fake_engine_core import FakeEngineCore, running_engine
from tests.gateway.fakes_engine import SCRATCH
from tests.gateway.streams import Connect, waits

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.metrics import GatewayMetrics


@pytest.fixture(autouse=True)
def stores_end() -> Iterator[None]:
    """Close the stores in memory that the test's gateways opened."""
    yield
    while SCRATCH:
        SCRATCH.pop().close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/e"


@pytest.fixture
async def engine(address: str) -> AsyncIterator[FakeEngineCore]:
    async with running_engine(address) as engine:
        yield engine


@pytest.fixture
async def connect(address: str) -> AsyncIterator[Connect]:
    clients: list[SessionClient] = []

    def start(**fields: float) -> SessionClient:
        client = SessionClient([EngineAddress(address)], GatewayMetrics("m"), waits(**fields))
        client.start()
        clients.append(client)
        return client

    yield start
    await asyncio.gather(*(client.aclose() for client in clients))
    assert [client.num_open for client in clients] == [0] * len(clients)


@pytest.fixture
async def client(connect: Connect) -> SessionClient:
    return connect()
