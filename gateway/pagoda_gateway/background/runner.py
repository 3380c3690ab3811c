"""A background response is in the store from its beginning; the gateway that holds its claim runs it.

Its tokens follow from its record, so a gateway that continues it generates it again, and writes only the events that
the store does not have yet. The claim only avoids duplicate work: events are appended at the index that the writer
knows, and the end is written to the version that it has read, so if two gateways run it, one gets a conflict and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec

from pagoda_gateway.api.encoding import encoded
from pagoda_gateway.api.errors import internal
from pagoda_gateway.background.running import Running
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.responses import told
from pagoda_gateway.dialects.responses_events import AlreadyTold, Telling, Told
from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.requests import BYTES_PER_TOKEN, held_bytes
from pagoda_gateway.generation.run import Outcome, Run
from pagoda_gateway.store.interface import Conflict, Full, Unreadable, decoded
from pagoda_gateway.store.response_logs import new_content
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Usage

logger = logging.getLogger(__name__)


class BackgroundResponses:
    """`start` it, and `aclose` it before the engine client: responses still running are left to the next gateway."""

    def __init__(self, ctx: GatewayContext) -> None:
        self._ctx = ctx
        self._kept = ctx.responses
        self._holder = secrets.token_hex(8)
        self._running: dict[str, Running] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep(), name="background-responses")

    async def aclose(self) -> None:
        self._closing = True
        tasks = [one.task for one in self._running.values() if one.task is not None]
        for task in filter(None, [self._sweeper, *tasks]):
            task.cancel()
        await asyncio.gather(*filter(None, [self._sweeper, *tasks]), return_exceptions=True)

    async def begin(self, job: Job) -> bytes:
        """Store and start a response; returns its initial object, as JSON.

        Raises:
            PagodaError: OVERLOADED if too many run, UNAVAILABLE if it cannot be stored.
        """
        if len(self._running) >= self._ctx.config.max_background_responses:
            message = f"{len(self._running)} responses run in the background here, and no more are allowed"
            raise PagodaError(ErrorCode.OVERLOADED, message, retry_after_s=times.RESPONSE_SWEEP_S)
        items, job = job.items, msgspec.structs.replace(job, items=b"")
        running = self._add(job, AlreadyTold())
        try:
            await self._kept.claim(job.id, self._holder, times.RESPONSE_LEASE_S)
            await self._kept.begin(job.id, job.owner, items, msgspec.json.encode(job), streamed=job.shown.stream)
        except BaseException:
            self._forget(running)
            raise
        response = encoded(running.telling.response | {"status": "queued"})
        if self._closing:
            self._forget(running)
            await self._release(job.id)
        else:
            self._run(running)
        return response

    async def is_kept(self, name: str, owner: str) -> bool:
        """Raises PagodaError if the store cannot say."""
        try:
            await self._kept.find(name, owner)
        except PagodaError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return False
        return True

    def snapshot(self, name: str) -> bytes | None:
        """The current object of the response, if it runs here."""
        running = self._running.get(name)
        return None if running is None else encoded(running.telling.response)

    async def cancelled(self, name: str) -> None:
        """End it now if it runs here. The caller has marked it in the store."""
        running = self._running.get(name)
        if running is not None and running.task is not None:
            running.cancel()
            await asyncio.wait([running.task])

    async def follow(self, name: str, owner: str, start: int) -> AsyncGenerator[bytes, None]:
        """Yield events from number `start` on, as they come, to the last. Raises PagodaError; UNAVAILABLE if this
        gateway ends first."""
        while True:
            live = running.live if (running := self._running.get(name)) is not None else None
            if live is not None and start >= live.begin:
                async for one in live.read(start):
                    start += 1
                    yield one
                if live.ended and start >= live.end:
                    return
            if self._closing:
                raise PagodaError(ErrorCode.UNAVAILABLE, "the gateway is shutting down; the response goes on")
            _, kept = await self._kept.find(name, owner)
            count = start
            async for one in self._kept.events(name, start):
                start += 1
                yield one
            if start > count:
                continue
            if kept.ended:
                return
            await asyncio.sleep(times.RESPONSE_POLL_S)

    def _add(self, job: Job, known: AlreadyTold) -> Running:
        """Raises PagodaError OVERLOADED."""
        holding = self._ctx.memory.holding(f"background {job.owner}")
        holding.grow_to(held_bytes(job) + BYTES_PER_TOKEN * job.num_prompt_tokens)
        running = self._running[job.id] = Running(
            job, self._kept, known, holding, self._ctx.charge_for_owner(job.owner, job.model)
        )
        return running

    def _forget(self, running: Running) -> None:
        running.holding.release()
        del self._running[running.job.id]

    def _run(self, running: Running) -> None:
        running.task = asyncio.create_task(self._to_its_end(running), name=running.job.id)

    async def _sweep(self) -> None:
        """Continue what other gateways have left."""
        while True:
            try:
                async for name, owner in self._kept.unfinished():
                    await self._take_over(name, owner)
                await self._kept.sweep()
            except PagodaError as error:
                logger.debug("cannot list unfinished responses: %s", error)
            await asyncio.sleep(times.RESPONSE_SWEEP_S)

    async def _take_over(self, name: str, owner: str) -> None:
        room = len(self._running) < self._ctx.config.max_background_responses
        if name in self._running or not room:
            return
        if not await self._kept.claim(name, self._holder, times.RESPONSE_LEASE_S):
            return
        try:
            going = await self._go_on(name, owner)
        except (Unreadable, Full):
            return  # the claim stays, so that no gateway retries at once
        except PagodaError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                raise
            if error.code is ErrorCode.NOT_FOUND:
                await self._kept.bury(name, owner)  # a gateway was interrupted while beginning or deleting it
            else:
                logger.debug("%s finds no room here, and is in nobody's way: %s", name, error)
            going = False
        except Exception:
            logger.exception("%s cannot be resumed", name)
            return  # as above
        if not going:
            await self._release(name)

    async def _go_on(self, name: str, owner: str) -> bool:
        """Returns whether it now runs here. Raises PagodaError."""
        record, kept = await self._kept.find(name, owner)
        data = await self._kept.job(name)
        if kept.ended or not data:
            await self._kept.close(name)
            return False
        job, known = decoded(name, data, Job), AlreadyTold()
        async for one in self._kept.events(name):
            known.add(msgspec.json.decode(one.split(b"data: ", 1)[1]))
        if known.ended is not None:
            with contextlib.suppress(Conflict):
                await self._kept.end(record, kept, encoded(known.ended), new_content())  # room was reserved before
            return False
        if not kept.cancelled and not self._has_model(job):
            return False
        logger.info("resuming %s after %d events", name, known.num_events)
        running = self._add(job, known)
        running.cancelled = kept.cancelled
        self._run(running)
        return True

    def _has_model(self, job: Job) -> bool:
        try:
            self._ctx.catalogue.of_job(job.model, job.adapter)
        except PagodaError:
            return False
        return True

    async def _release(self, name: str) -> None:
        with contextlib.suppress(PagodaError):
            await self._kept.release(name, self._holder)

    async def _to_its_end(self, running: Running) -> None:
        name, ended, running.begun = running.job.id, False, True
        beside = [asyncio.create_task(work) for work in (self._keep_claim(running), running.keep_writing())]
        try:
            last = _cancelled(running.telling) if running.cancelled else await self._generated(running)
            running.ending = True
            beside[1].cancel()
            ended = await running.end(last)
        except Conflict:
            logger.info("%s has been taken over elsewhere, or deleted", name)
        finally:
            for task in beside:
                task.cancel()
            self._forget(running)
            running.live.close(ended=ended)
            with contextlib.suppress(PagodaError):
                if not ended and not await self.is_kept(name, running.job.owner):
                    await self._kept.bury(name, running.job.owner)  # .. with all that was written after the deletion
            await self._release(name)

    async def _keep_claim(self, running: Running) -> None:
        """Renew the claim; stop the run if another gateway has it, or a client cancels or deletes the response. A lost
        store stops nothing."""
        job, task = running.job, running.task
        while task is not None:
            await asyncio.sleep(times.RESPONSE_LEASE_S / 3)
            try:
                mine = await self._kept.claim(job.id, self._holder, times.RESPONSE_LEASE_S)
                _, kept = await self._kept.find(job.id, job.owner)
            except PagodaError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    running.drop()
            else:
                if kept.cancelled:
                    running.cancel()
                elif not mine and not running.ending:
                    task.cancel()

    async def _generated(self, running: Running) -> Iterator[Told]:
        """Generate the response; returns its last events."""
        job, telling = running.job, running.telling
        model, charge = self._ctx.catalogue.of_job(job.model, job.adapter), running.charge

        def on_end(usage: Usage, outcome: Outcome) -> None:
            running.usage = usage
            charge.release(usage)

        run = Run(job, model.text, on_end)
        try:
            async with aclosing(run):
                await self._tell_all(running, run, model.engine)
            return telling.finish(run.usage(), int(time.time()), run.num_reasoning_tokens())
        except PagodaError as error:
            return telling.fail(error, run.usage())
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this response, and is not tried again for ever
            return telling.fail(internal(error, {"state": {"request_id": job.id}}), run.usage())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or running.deleted or not (running.cancelled or running.failure):
                raise
            task.uncancel()
            failure = running.failure
            return telling.cancel(run.usage()) if failure is None else telling.fail(failure, run.usage())

    async def _tell_all(self, running: Running, run: Run, engine: EngineClient) -> None:
        """Emit all events but the last. Raises PagodaError."""
        running.charge.begin(run.usage)
        await self._started(run, engine)
        running.charge.taken()
        async with aclosing(told(run, running.telling)) as events:
            async for said in events:
                running.tell(said)

    @staticmethod
    async def _started(run: Run, engine: EngineClient) -> None:
        """Start the run, waiting out overload, because no client waits. Raises PagodaError."""
        while True:
            try:
                await run.start(engine)
            except PagodaError as error:
                if error.code is not ErrorCode.OVERLOADED:
                    raise
                await asyncio.sleep(error.retry_after_s or times.RESPONSE_SWEEP_S)
            else:
                return


def _cancelled(telling: Telling) -> Iterator[Told]:
    """The events of a response that is cancelled before it runs here."""
    yield from telling.begin()
    yield from telling.cancel(Usage(prompt_tokens=0))
