"""What a Redis server can do to a store: hang, die, come back, and refuse with various errors."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import uvloop
from bench.sides import free_port
from redis.asyncio import Redis
from tests.faults.proxy import ChaosProxy
from tests.gateway.store.redis_server import RedisServer, running_redis

from pagoda_gateway.store.guard import GuardedStore
from pagoda_gateway.store.interface import Conflict, Full, Unreadable
from pagoda_gateway.store.redis_store import MAX_CONNECTIONS, PREFIX, RedisStore
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

BUDGET_S = 0.2


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with running_redis() as server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.address)
    yield store
    await store.aclose()


async def fails(store: RedisStore | GuardedStore) -> str:
    """The reason for a failed call, as logged."""
    with pytest.raises(PagodaError) as caught:
        await store.put("things", "k", b"v")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    return "; ".join(caught.value.__notes__)


@pytest.mark.e2e
async def test_who_dies_and_comes_back_has_what_it_had(server: RedisServer, store: RedisStore) -> None:
    await asyncio.gather(*(store.put("things", f"k{i}", b"v") for i in range(20)))  # over several connections
    await store.append("log", [b"a"])
    await server.kill()
    assert "Connection" in await fails(store)
    assert "Connection" in await fails(store)
    await server.start()
    assert await store.get("things", "k19") is not None
    assert await store.append("log", [b"b"], index=1) == 2
    counts = await asyncio.gather(*(store.append("n", [b"."]) for i in range(20)))
    assert sorted(counts) == list(range(1, 21))


@pytest.mark.e2e
async def test_who_hangs_costs_a_call_its_budget_and_is_found_again(server: RedisServer, store: RedisStore) -> None:
    outcomes: list[str] = []
    moments = [0.0]
    patient = GuardedStore(store, outcomes.append, clock=lambda: moments[0])
    assert await patient.append("n", [b"."]) == 1
    server.send(signal.SIGSTOP)
    guarded = GuardedStore(store, outcomes.append, budget_s=BUDGET_S, clock=lambda: moments[0])
    assert "no answer" in await fails(guarded)
    assert "circuit" in await fails(guarded)
    moments[0] = 1000.0
    assert "no answer" in await fails(guarded)
    server.send(signal.SIGCONT)
    assert "circuit" in await fails(guarded)
    assert await patient.append("n", [b"."]) == 2
    assert outcomes == ["answered", "late", "refused", "late", "refused", "answered"]


@pytest.mark.e2e
async def test_every_refusal_is_one_failure(server: RedisServer, store: RedisStore) -> None:
    admin = Redis.from_url(server.address)
    await store.put("things", "k", b"v")
    try:
        await admin.config_set("maxmemory", "1")
        with pytest.raises(Full, match="no room"):
            await store.put("things", "other", b"v")
        assert await store.get("things", "k") is not None
        await admin.config_set("maxmemory", "0")
        await admin.replicaof("127.0.0.1", "1")
        assert "ReadOnly" in await fails(store)
        await admin.replicaof("NO", "ONE")
        await admin.delete(f"{PREFIX}record:things:k")
        await admin.rpush(f"{PREFIX}record:things:k", "a list")
        assert "WRONGTYPE" in await fails(store)
        await admin.flushall()
        await admin.script_flush()
        assert await store.get("things", "k") is None
        await store.put("things", "k", b"v")
        await admin.config_set("requirepass", "secret word")
        await store.aclose()
        assert "uthenticat" in await fails(store)
    finally:
        await admin.aclose()
    with_password = RedisStore(f"{server.address}?password=secret%20word")
    assert await with_password.get("things", "k") is not None
    await with_password.aclose()


@pytest.mark.e2e
async def test_indices_lose_what_has_expired(server: RedisServer, store: RedisStore) -> None:
    await store.put("things", "soon", b"v", owner="me", expires_at=time.time() + 0.05)
    admin = Redis.from_url(server.address)
    try:
        while await store.get("things", "soon") is not None:  # noqa: ASYNC110 - by the server's clock
            await asyncio.sleep(0.05)
        assert await admin.zcard(f"{PREFIX}index:things:me") == 1
        await store.put("things", "other", b"v", owner="you")
        assert await admin.zcard(f"{PREFIX}index:things:me") == 0
        assert await admin.zcard(f"{PREFIX}expiring") == 0
    finally:
        await admin.aclose()


@pytest.mark.e2e
async def test_who_is_cancelled_ends_wherever_that_meets_a_call(store: RedisStore) -> None:
    async def ask_for_ever() -> None:
        while True:
            await store.length("log")

    for turns in range(60):  # of the event loop, spanning several calls
        task = asyncio.create_task(ask_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert task.done(), f"after {turns} turns"


@pytest.mark.e2e
async def test_more_calls_at_once_than_there_may_be_connections_wait_for_one(
    server: RedisServer, store: RedisStore
) -> None:
    outcomes: list[str] = []
    guarded, admin = GuardedStore(store, outcomes.append), Redis.from_url(server.address)
    try:
        versions = await asyncio.gather(*(guarded.put("things", f"k{i}", b"v") for i in range(5 * MAX_CONNECTIONS)))
        assert len(set(versions)) == outcomes.count("answered") == 5 * MAX_CONNECTIONS
        assert int((await admin.info("clients"))["connected_clients"]) <= MAX_CONNECTIONS + 1
    finally:
        await admin.aclose()


@pytest.mark.e2e
async def test_connections_that_went_dumb_are_not_tried_one_by_one() -> None:
    """A peer that lost power answers on none of them, while its successor accepts new connections."""
    port = free_port()
    async with running_redis(port):
        with ChaosProxy(port) as proxy:
            store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
            moments = [0.0]
            guarded = GuardedStore(store, budget_s=times.STORE_REST_S + BUDGET_S, clock=lambda: moments[0])
            await asyncio.gather(*(guarded.append("n", [b"."]) for _ in range(8)))
            assert proxy.num_links > 1
            proxy.vanish()
            assert "no answer" in await fails(guarded)
            moments[0] = 1000.0
            assert await guarded.length("n") == 8
            assert await asyncio.gather(*(guarded.length("n") for _ in range(8))) == [8] * 8
            await guarded.aclose()


@pytest.mark.e2e
def test_connections_that_were_reset_under_uvloop_are_a_failure_and_none_afterwards() -> None:
    """uvloop, on which gateways run, raises a different error for writes to such connections."""

    async def story() -> None:
        port = free_port()
        async with running_redis(port):
            with ChaosProxy(port) as proxy:
                store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
                await asyncio.gather(*(store.append("n", [b"."]) for _ in range(8)))
                writers = [idle._writer for idle in store._redis.connection_pool._available_connections]
                assert len(writers) > 1
                proxy.reset()
                while not all(writer.transport.is_closing() for writer in writers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await fails(store)
                assert await asyncio.gather(*(store.length("n") for _ in range(8))) == [8] * 8
                await store.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


@pytest.mark.e2e
async def test_what_is_not_ours_under_one_name_is_told_of_that_name_alone(
    server: RedisServer, store: RedisStore
) -> None:
    outcomes: list[str] = []
    guarded, admin = GuardedStore(store, outcomes.append), Redis.from_url(server.address)
    try:
        await admin.rpush(f"{PREFIX}record:things:k", "a list")
        assert "WRONGTYPE" in await fails(guarded)
        await admin.delete(f"{PREFIX}record:things:k")
        await admin.zadd(f"{PREFIX}index:things:o", {"k": 1})
        for fields in ({"version": "1"}, {"version": "x", "owner": "o", "value": "v", "position": "1", "expires": "0"}):
            await admin.hset(f"{PREFIX}record:things:k", mapping=fields)
            with pytest.raises(Unreadable):
                await guarded.get("things", "k")
        with pytest.raises(Unreadable):
            await guarded.page("things", "o", limit=5)
        assert not guarded.failing
        assert await guarded.get("things", "other") is None
        assert set(outcomes) == {"answered"}
    finally:
        await admin.aclose()


@pytest.mark.e2e
@pytest.mark.parametrize("loses", ["everything", "its last writes"])
async def test_who_knew_a_version_of_a_server_that_has_lost_it_is_refused(
    server: RedisServer, store: RedisStore, loses: str
) -> None:
    admin = Redis.from_url(server.address)
    try:
        versions = f"{PREFIX}versions"
        for name in ("other", "k"):
            before = await admin.get(versions)
            known = await store.put("things", name, b"1")
        if loses == "everything":
            await admin.flushall()
            await store.put("things", "other", b"1")
        else:
            await admin.delete(f"{PREFIX}record:things:k")
            await admin.set(versions, before)
        await store.put("things", "k", b"2")
        with pytest.raises(Conflict):
            await store.put("things", "k", b"1, changed", expect=known)
    finally:
        await admin.aclose()
