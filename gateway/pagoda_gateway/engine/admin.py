"""Questions to an engine core that are no requests, on the connection of its session."""

from __future__ import annotations

import asyncio
import time

import grpc

from pagoda_gateway.engine.report import EngineReport, WorkerReport
from pagoda_proto import times
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import AdminStub


async def ask_report(channel: grpc.aio.Channel) -> EngineReport | None:
    """None where the engine core does not answer in time, or at all."""
    admin = AdminStub(channel)  # type: ignore[no-untyped-call]
    questions = ((admin.ListWorkers, pb.ListWorkersRequest()), (admin.GetStats, pb.GetStatsRequest()))
    calls = [asyncio.ensure_future(method(asked, timeout=times.REPORT_WAIT_S)) for method, asked in questions]
    try:
        await asyncio.wait(calls)  # a channel that is closed cancels its calls, which is no cancellation of ours
    finally:
        for call in calls:
            call.cancel()
    if any(call.cancelled() or isinstance(call.exception(), grpc.aio.AioRpcError) for call in calls):
        return None
    return _report(*(call.result() for call in calls))


def _report(workers: pb.ListWorkersResponse, stats: pb.GetStatsResponse) -> EngineReport:
    totals = [field.name for field in stats.DESCRIPTOR.fields if field.name != "load"]
    fields = WorkerReport.__struct_fields__
    return EngineReport(
        at_s=time.monotonic(),
        workers=tuple(WorkerReport(**{name: getattr(each, name) for name in fields}) for each in workers.workers),
        totals={name: getattr(stats, name) for name in totals},
    )
