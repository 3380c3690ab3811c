"""A plain call has no gateway that could move it, so an engine core that leaves says so, and when to retry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable
from pathlib import Path

import grpc
import pytest
from tests.engine_core.fake_worker import FakeWorker
from tests.engine_core.served import Server, Session, eventually
from tests.fakes import make_record, reference_tokens

from pagoda_proto import convert
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc as pb_grpc


async def test_a_plain_call_is_refused_while_the_engine_core_leaves_and_told_when_to_come_back(
    socket_dir: Path,
) -> None:
    server = Server(socket_dir, drain_timeout_s=600.0)
    await server.event("listening")
    async with contextlib.AsyncExitStack() as stack:
        worker = stack.enter_context(FakeWorker(server.config.worker_endpoint))
        stack.push_async_callback(server.close)
        await server.workers(1)
        worker.hold.set()
        open_before, late = make_record(max_tokens=4, seed=7), make_record()
        call = server.engine.Generate(pb.GenerateRequest(record=convert.record_to_pb(open_before)))
        reading = asyncio.create_task(_deltas_of(call))
        session = Session(server)
        await eventually(lambda: _answered(server.admin, 1))
        server.stop.set()
        while not (frame := await session.read()) or not frame.load.draining:
            pass
        with pytest.raises(grpc.aio.AioRpcError, match="draining") as refused:
            await _deltas_of(server.engine.Generate(pb.GenerateRequest(record=convert.record_to_pb(late))))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        trailers = dict([*refused.value.trailing_metadata()])
        assert (trailers["pagoda-code"], trailers["pagoda-retry-after-ms"]) == ("unavailable", "12000")
        worker.hold.clear()
        tokens = [token for delta in await reading for token in delta.tokens.token_ids]
        assert tokens == reference_tokens(open_before)[0], "what was open goes on"


async def _deltas_of(call: AsyncIterable[pb.GenerateResponse]) -> list[pb.Delta]:
    return [response.delta async for response in call]


async def _answered(admin: pb_grpc.AdminStub, num_running: int) -> bool:
    return bool((await admin.GetStats(pb.GetStatsRequest())).load.num_running == num_running)
