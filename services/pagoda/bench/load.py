"""Sends a workload to a server and measures times, in a closed loop (fixed concurrency) or an open loop (set times)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from pagoda.bench.workload import BodyMaker, WorkloadRow
from pagoda.tools.http_stream import Connection, HttpAnswer, HttpError, StaleConnection, Target
from pagoda.tools.timing import Timing


@dataclass
class Sent:
    """A row that was sent, and its outcome. Warm-up requests have negative indices."""

    index: int
    row: WorkloadRow
    timing: Timing = field(default_factory=Timing)


@dataclass
class LoadResult:
    sent: list[Sent]
    wall_s: float
    client_cpu_s: float
    peak_in_flight: int
    late_starts_s: list[float]


class LoadClient:
    """A pool of connections to one server. `resumable`: every request gets its own `Idempotency-Key`."""

    def __init__(self, target: Target, bodies: BodyMaker, timeout_s: float, resumable: bool = False) -> None:
        self._target = target
        self._bodies = bodies
        self._timeout_s = timeout_s
        self._resumable = resumable
        self._idle: list[Connection] = []
        self._in_flight = 0
        self.peak_in_flight = 0

    async def send(self, index: int, row: WorkloadRow) -> Sent:
        """Send one request and read its whole answer; failures are recorded in the timing."""
        sent = Sent(index, row)
        timing = sent.timing
        headers = [f"Idempotency-Key: {uuid.uuid4()}"] if self._resumable else []
        request = self._target.request("POST", self._bodies.path, self._bodies.body(index, row), *headers)
        with self._counted():
            timing.started = time.perf_counter()
            try:
                timing.finish(await self._exchange(request, timing))
            except HttpError as error:
                timing.error = str(error)
            timing.ended = time.perf_counter()
        return sent

    async def _exchange(self, request: bytes, timing: Timing) -> HttpAnswer:
        while True:
            connection = await self._connection()
            try:
                answer = await connection.exchange(request, timing.on_event, self._timeout_s)
            except StaleConnection:
                continue
            if connection.alive:
                self._idle.append(connection)
            return answer

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return await Connection.open(self._target)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= 1

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


@dataclass(frozen=True)
class Plan:
    """When to send. With `starts` (seconds, one per row), an open loop; otherwise `concurrency` requests in flight."""

    rows: list[WorkloadRow]
    concurrency: int
    starts: list[float] | None
    duration_s: float | None  # start nothing new after this long


async def run_load(client: LoadClient, plan: Plan) -> LoadResult:
    """Send everything and wait for every answer."""
    late: list[float] = []
    client.peak_in_flight = 0
    gc.collect()
    gc.disable()  # a collection during the measurement would distort it
    cpu, started = time.process_time(), time.perf_counter()
    try:
        if plan.starts is None:
            sent = await _closed_loop(client, plan, started)
        else:
            sent = await _open_loop(client, plan, plan.starts, started, late)
    finally:
        gc.enable()
    return LoadResult(
        sent=sorted(sent, key=lambda one: one.index),
        wall_s=time.perf_counter() - started,
        client_cpu_s=time.process_time() - cpu,
        peak_in_flight=client.peak_in_flight,
        late_starts_s=late,
    )


async def _closed_loop(client: LoadClient, plan: Plan, started: float) -> list[Sent]:
    queue = iter(enumerate(plan.rows))
    done: list[Sent] = []

    async def sender() -> None:
        for index, row in queue:
            if plan.duration_s is not None and time.perf_counter() - started > plan.duration_s:
                return
            done.append(await client.send(index, row))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, len(plan.rows))):
            group.create_task(sender())
    return done


async def _open_loop(
    client: LoadClient, plan: Plan, starts: list[float], started: float, late: list[float]
) -> list[Sent]:
    tasks: list[asyncio.Task[Sent]] = []
    async with asyncio.TaskGroup() as group:
        within = [start for start in starts if plan.duration_s is None or start <= plan.duration_s]
        async for index, delay in _moments(within, started):
            late.append(delay)
            tasks.append(group.create_task(client.send(index, plan.rows[index])))
    return [task.result() for task in tasks]


async def _moments(starts: list[float], started: float) -> AsyncIterator[tuple[int, float]]:
    """Yield each row's number at its start time, and how late that is."""
    for index, start in enumerate(starts):
        wait = started + start - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        yield index, max(0.0, time.perf_counter() - started - start)
