from __future__ import annotations

import grpc
import pytest
from tests.engine_core.fake_worker import RSS_BYTES, FakeWorker, make_hello
from tests.engine_core.served import Server, Session
from tests.fakes import make_record, reference_tokens

from pagoda_proto.engine.v1 import engine_pb2 as pb


async def workers(server: Server) -> dict[str, pb.Worker]:
    listed = await server.admin.ListWorkers(pb.ListWorkersRequest())
    return {worker.worker_id: worker for worker in listed.workers}


async def test_workers_are_listed_with_what_they_do(server: Server) -> None:
    assert await workers(server) == {}
    worker = FakeWorker(server.config.worker_endpoint, make_hello("w0", num_blocks=32))
    worker.hold.set()
    with worker:
        await server.workers(1)
        session = Session(server)
        session.submit(make_record(range(20), max_tokens=4, request_id="r"))
        await session.answer()
        while not (listed := (await workers(server))["w0"]).num_rows:
            pass
        while not (await workers(server))["w0"].rss_bytes:
            pass
        assert (await workers(server))["w0"].rss_bytes == RSS_BYTES
        assert (listed.state, listed.device, listed.num_blocks) == ("ready", "fake", 32)
        assert 0 < listed.num_free_blocks < 32
        worker.hold.clear()
        await session.until("r")
    while (listed := (await workers(server))["w0"]).state == "ready":
        pass
    assert listed.steps_done >= 4


async def test_stats_add_up(server: Server) -> None:
    with FakeWorker(server.config.worker_endpoint, make_hello(num_swap_blocks=5)):
        await server.workers(1)
        session = Session(server)
        for name in ("a", "b"):
            session.submit(make_record(range(10), max_tokens=7, request_id=name))
            await session.until(name)
        stats = await server.admin.GetStats(pb.GetStatsRequest())
        assert (stats.output_tokens, stats.prompt_tokens, stats.cached_prompt_tokens) == (14, 20, 8)
        assert (stats.blocks_total, stats.blocks_used, stats.swap_blocks_total) == (64, 0, 5)
        assert stats.blocks_cached > 0
        assert stats.steps >= 14
        reset = await server.admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        assert reset.blocks_dropped == stats.blocks_cached


async def test_a_drained_worker_leaves_and_its_requests_go_on(server: Server) -> None:
    session, record = Session(server), make_record(max_tokens=200)
    with (
        FakeWorker(server.config.worker_endpoint, make_hello("w0"), step_s=0.002),
        FakeWorker(server.config.worker_endpoint, make_hello("w1"), step_s=0.002),
    ):
        await server.workers(2)
        session.submit(record)
        while len(session.deltas) < 5:
            await session.read()
        busy = next(name for name, worker in (await workers(server)).items() if worker.num_rows)
        await server.admin.DrainWorker(pb.DrainWorkerRequest(worker_id=busy))
        await session.until(record.request_id)
        assert session.tokens(record.request_id) == reference_tokens(record)[0]
        while (await workers(server))[busy].state != "gone":
            pass


async def test_draining_a_worker_that_is_not_there_is_not_found(server: Server) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await server.admin.DrainWorker(pb.DrainWorkerRequest(worker_id="nobody"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert dict([*raised.value.trailing_metadata()])["pagoda-code"] == "not_found"
