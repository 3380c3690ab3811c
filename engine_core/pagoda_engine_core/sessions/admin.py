"""The `Admin` service: each call is one query to the engine core's loop thread, answered between two passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import grpc

from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.scheduling.kv_cache import BlockCounts
from pagoda_engine_core.sessions.session import abort_with
from pagoda_engine_core.views import Stats, WorkerView
from pagoda_proto import convert
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc as pb_grpc
from pagoda_proto.errors import ErrorCode, PagodaError

ANSWER_WITHIN_S = 5.0
_FIELDS = [field.name for field in pb.GetStatsResponse.DESCRIPTOR.fields]
_TOTALS = [name for name in _FIELDS if name not in ("load", *BlockCounts._fields)]

T = TypeVar("T")


class AdminService(pb_grpc.AdminServicer):
    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListWorkersResponse:
        views = await self._ask(context, self._engine.workers)
        return pb.ListWorkersResponse(workers=[_worker_to_pb(view) for view in views])

    async def GetStats(
        self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatsResponse:
        return _stats_to_pb(await self._ask(context, self._engine.stats))

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(blocks_dropped=await self._ask(context, self._engine.reset_prefix_cache))

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainWorkerResponse:
        await self._ask(context, partial(self._engine.drain_worker, request.worker_id))
        return pb.DrainWorkerResponse()

    async def _ask(self, context: grpc.aio.ServicerContext[Any, Any], question: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await asyncio.wrap_future(self._engine.call(question))
        except TimeoutError:
            error = PagodaError(ErrorCode.UNAVAILABLE, f"the engine core did not answer within {ANSWER_WITHIN_S:g} s")
        except PagodaError as raised:
            error = raised
        return await abort_with(context, error)


def _worker_to_pb(view: WorkerView) -> pb.Worker:
    info = view.info
    return pb.Worker(
        worker_id=info.hello.worker_id,
        state=info.state.value,
        epoch=info.epoch,
        device=info.hello.device,
        numerics_id=info.hello.numerics_id,
        num_blocks=info.hello.num_blocks,
        num_free_blocks=view.num_free_blocks,
        num_rows=view.num_rows,
        steps_done=info.steps_done,
        rss_bytes=info.rss_bytes,
        pid=info.hello.pid,
    )


def _stats_to_pb(stats: Stats) -> pb.GetStatsResponse:
    return pb.GetStatsResponse(
        load=convert.load_to_pb(stats.load),
        **stats.blocks._asdict(),
        **{name: stats.totals.get(name, 0) for name in _TOTALS},
    )
