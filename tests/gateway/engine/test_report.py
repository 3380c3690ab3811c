"""Viewing the stack costs the engine core little, and gets no report rather than a long wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.gateway.fake_engine_core import FakeEngineCore, until

from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.report import EngineReport, Reports, WorkerReport, joined
from pagoda_gateway.engine.session import ask_report
from pagoda_proto import times
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import AdminServicer, add_AdminServicer_to_server

WORKER = pb.Worker(worker_id="w", state="ready", epoch=3, device="cpu", num_blocks=10, num_free_blocks=4, num_rows=2,
                   steps_done=7, pid=4242, rss_bytes=1024)  # fmt: skip


class Admin(AdminServicer):
    """Clear `answers` to leave calls unanswered; a call sets `asked`."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Event()

    async def ListWorkers(self, request: Any, context: Any) -> pb.ListWorkersResponse:
        self.asked.set()
        await self.answers.wait()
        return pb.ListWorkersResponse(workers=[WORKER])

    async def GetStats(self, request: Any, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(output_tokens=5, blocks_total=10)


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[tuple[Admin, grpc.aio.Channel]]:
    service, server = Admin(), grpc.aio.server()
    add_AdminServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{tmp_path}/admin")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/admin") as channel:
        yield service, channel
    await server.stop(grace=0)


async def test_workers_and_totals_are_told_and_nothing_of_processes(admin: tuple[Admin, grpc.aio.Channel]) -> None:
    report = await ask_report(admin[1])
    assert report is not None
    (worker,) = report.workers
    assert {name: getattr(worker, name) for name in worker.__struct_fields__} == {
        "worker_id": "w", "state": "ready", "epoch": 3, "device": "cpu", "num_blocks": 10, "num_free_blocks": 4,
        "num_rows": 2, "steps_done": 7, "rss_bytes": 1024,
    }  # fmt: skip
    assert report.totals["output_tokens"] == 5
    assert "load" not in report.totals


async def test_a_connection_that_closes_leaves_the_question_without_an_answer(
    admin: tuple[Admin, grpc.aio.Channel],
) -> None:
    service, channel = admin
    service.answers.clear()
    asking = asyncio.create_task(ask_report(channel))
    await service.asked.wait()
    await channel.close()
    assert await asking is None
    service.answers.set()


async def test_a_session_without_workers_to_tell_of_tells_nothing(
    engine: FakeEngineCore, client: SessionClient
) -> None:
    assert await client.report() is None  # not connected yet, or without this service
    await until(lambda: client.connected)
    assert await client.report() is None


def test_several_engine_cores_are_told_as_one_and_their_workers_apart() -> None:
    worker = WorkerReport(
        worker_id="w", state="ready", epoch=1, device="cpu", num_blocks=9, num_free_blocks=4, num_rows=1, steps_done=7,
        rss_bytes=1,
    )  # fmt: skip
    one, two = (EngineReport(at_s=at_s, workers=(worker,), totals={"n": 2}) for at_s in (1.0, 2.0))
    assert joined([one]) is one
    both = joined([one, None, two])
    assert both is not None
    assert ([each.worker_id for each in both.workers], both.totals, both.at_s) == (["1/w", "3/w"], {"n": 4}, 2.0)
    assert joined([None, None]) is joined([None]) is None


class Asking:
    """Answers with a delay, and counts calls."""

    def __init__(self) -> None:
        self.count = 0
        self.now = 100.0

    async def __call__(self) -> EngineReport:
        self.count += 1
        await asyncio.sleep(0)
        return EngineReport(at_s=self.now, workers=(), totals={"n": self.count})


async def test_however_many_ask_it_is_asked_once_in_a_while() -> None:
    asking = Asking()
    reports = Reports(asking, lambda: asking.now)
    answers = await asyncio.gather(*(reports.latest() for _ in range(20)))
    assert (asking.count, len(set(map(id, answers)))) == (1, 1)
    asking.now += times.REPORT_AGE_S / 2
    await reports.latest()
    assert asking.count == 1
    asking.now += times.REPORT_AGE_S / 2
    newest = await reports.latest()
    assert newest is not None
    assert newest.totals == {"n": 2}


async def test_who_asks_and_leaves_spoils_it_for_nobody() -> None:
    asking = Asking()
    reports = Reports(asking, lambda: asking.now)
    leaving = asyncio.create_task(reports.latest())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await reports.latest() is not None
