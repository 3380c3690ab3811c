"""Tokens follow from the job, so a ticket needs only the job: any gateway runs it again and sends what is missing.

If a job runs here, all its readers read the same tape; if not, this gateway runs it. Claims avoid duplicate work, and
keep an answer that is not a stream from being awaited at two gateways, but correctness does not depend on them. A
finished answer is stored as its tape, so that the code that answered first also answers a repeated request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import msgspec

from pagoda_gateway.api.errors import internal
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.dialect import Dialect, Writer
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.positions import MAX_CHOICES, Marks
from pagoda_gateway.generation.requests import BYTES_PER_TOKEN, check_products, held_bytes
from pagoda_gateway.generation.run import Run
from pagoda_gateway.generation.running import running
from pagoda_gateway.generation.tape import Tape
from pagoda_gateway.keys.charge import Charge
from pagoda_gateway.store.interface import MAX_APPEND_BYTES, MAX_VALUE_BYTES, Conflict, decoded
from pagoda_gateway.store.opening import is_lasting
from pagoda_gateway.store.room import Room
from pagoda_gateway.store.tickets import Found, KeptTickets, Ticket, check_job, not_found
from pagoda_gateway.tickets.live import Live
from pagoda_gateway.tickets.naming import Named, Opened, Reader
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """A job and its finished tape, from the store."""

    job: Job
    tape: Tape


WAYS = ("begun", "joined", "repeated", "run again")
NewJob = Callable[[], Awaitable[Job]]


class Tickets:
    """Call `leave` before the gateway drains, and `aclose` before closing the engine client. `on_read` receives one of
    WAYS for every request that is read."""

    def __init__(self, ctx: GatewayContext, on_read: Callable[[str], None] = lambda way: None) -> None:
        self._ctx = ctx
        self._on_read = on_read
        self._kept = KeptTickets(ctx.store, ctx.config.keep_tickets_s)
        self._room = Room(self._kept, ctx.config.max_tickets, ctx.config.max_tickets_bytes)
        self._holder = secrets.token_hex(8)
        self._live: dict[str, Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # each until its last write, after it has left `_live`
        self._grace_s = ctx.config.ticket_grace_s

    async def leave(self) -> None:
        """Leave runs without readers to the gateway that is asked for them next. If the store outlives this gateway,
        hand over those whose readers all resume elsewhere."""
        self._grace_s = 0.0
        lasts = is_lasting(self._ctx.config.store)
        moving = [live for live in self._live.values() if lasts and live.num_resuming == live.num_readers]
        await self._hand_over(moving)
        for live in list(self._live.values()):
            live.hurry()

    async def hand_over_all(self) -> None:
        """Hand over all runs: the drain timeout is over."""
        await self._hand_over(list(self._live.values()))

    async def _hand_over(self, several: list[Live]) -> None:
        await asyncio.gather(*(self._keep_so_far(live) for live in several))
        for live in several:
            live.stop(PagodaError(ErrorCode.UNAVAILABLE, "this gateway is shutting down; ask another one"))

    async def _keep_so_far(self, live: Live) -> None:
        """Store the tape so far. What cannot be stored is generated again; so are beam searches, and runs that may use
        another grammar than their job's."""
        job, tape = live.job, live.tape
        plain = not (job.loose_grammar or job.records[0].task.params.use_beam_search)
        if plain and tape.was_started and tape.num_numbers <= MAX_VALUE_BYTES:
            so_far = tape.dump()
            with suppress(PagodaError):
                async with self._room.taking(live.found.owner, len(so_far), number=0):
                    await self._kept.hand_over(live.found, so_far, 2 * times.TICKET_GRACE_S)

    async def aclose(self) -> None:
        for live in list(self._live.values()):
            live.stop(PagodaError(ErrorCode.UNAVAILABLE, "the gateway is shutting down"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._kept.aclose()

    # Opening tickets

    async def open(self, named: Named, new_job: NewJob) -> Opened:
        """Find or begin the request's ticket.

        Raises:
            PagodaError: KEY_REUSED if the key stands for another request; what `new_job` raises. If the client has part
                of the answer, so that it must not begin anew: NOT_FOUND without a ticket, UNAVAILABLE without a store.
        """
        job: Job | None = None
        try:
            while True:
                if (found := await self._kept.find(named.name, named.owner)) is not None:
                    return Opened(_same(found, named), None, repeated=True)
                if await self._written_again(self._live.get(named.name)):
                    continue
                if named.at is not None and named.at.stream == named.name:
                    raise not_found(named.name)
                job = job or await _outside(new_job())
                with suppress(Conflict):
                    asked = job if named.background else job.of_many()
                    asked = msgspec.structs.replace(asked, ticket=named.name)
                    return Opened(await self._begin(named, asked), asked)
        except _Outside as failure:
            raise failure.error from None
        except PagodaError as error:
            if error.code is not ErrorCode.UNAVAILABLE or named.at is not None:
                raise
            return Opened(None, job)

    async def _begin(self, named: Named, job: Job) -> Found:
        if named.stream:
            self._check_stream(job)
        data = b"" if named.background else msgspec.json.encode(job)
        ticket = Ticket(
            digest=named.digest,
            path=named.path,
            job_id=job.id,
            num_bytes=len(data),
            stream=named.stream,
            background=named.background,
            runner=self._holder,
            ended_at=time.time() if named.background else 0.0,
        )
        check_job(data)
        async with self._room.taking(named.owner, len(data)):
            return await self._kept.begin(named.name, named.owner, ticket, data)

    async def _written_again(self, live: Live | None) -> bool:
        """Write the ticket of a live run again, after the store has lost it. False if it was deleted or has ended."""
        if live is None or live.why is not None or live.tape.ended:
            return False
        if await self._kept.is_forgotten(live.job.id):
            return False
        found = live.found
        with suppress(Conflict):
            live.found = await self._kept.begin(found.name, found.owner, found.ticket, msgspec.json.encode(live.job))
        return True

    def _check_stream(self, job: Job) -> None:
        """Raises InvalidParams if the answer would be larger than a stream that can be read again may be."""
        params, prompts = job.records[0].task.params, [len(record.prompt_token_ids) for record in job.records]
        if params.n * len(prompts) > MAX_CHOICES:
            message = f"a stream with an Idempotency-Key has at most {MAX_CHOICES} choices, prompts x n"
            raise InvalidParams([Problem("n", message)])
        whole = msgspec.structs.replace(job.shown, stream=False)
        check_products(self._ctx.config, self._ctx.catalogue.of_job(job.model, job.adapter), params, prompts, whole)

    async def find(self, name: str, owner: str) -> Found:
        """Raises PagodaError NOT_FOUND."""
        found = await self._kept.find(name, owner)
        if found is None or not found.ticket.stream or found.ticket.background:
            raise not_found(name)
        return found

    async def let_go(self, found: Found) -> None:
        """Delete the ticket of a response that was never stored or was deleted, so that the request may begin anew.

        Raises:
            PagodaError: IN_PROGRESS: its gateway may still be starting it.
        """
        if self._kept.age_s(found) < times.TICKET_LEASE_S:
            message = "the request with this Idempotency-Key is still being started; try again"
            raise PagodaError(ErrorCode.IN_PROGRESS, message, retry_after_s=times.RESPONSE_SWEEP_S)
        with suppress(Conflict):
            self._room.freed(found.owner, await self._kept.let_go(found))

    async def forget(self, found: Found) -> None:
        """Delete the ticket and end its run: here now, at another gateway when that one checks."""
        self._room.freed(found.owner, await self._kept.forget(found))
        if (live := self._live.get(found.name)) is not None:
            live.stop(PagodaError(ErrorCode.CANCELLED, "the stream was deleted"))

    async def forget_job(self, job_id: str, owner: str) -> None:
        """Forget the job's ticket, if it has one."""
        if (found := await self._kept.of_job(job_id, owner)) is not None:
            await self.forget(found)

    # Reading

    @asynccontextmanager
    async def reading(
        self, found: Found, job: Job | None, dialect: Dialect[Any], charge: Callable[[str], Charge], reader: Reader
    ) -> AsyncIterator[Writer]:
        """`job`, if the caller has it; `charge` makes the charge of a run, for a model's name.

        Raises:
            PagodaError: IN_PROGRESS if it is not a stream and another gateway is answering it; as a run does.
        """
        try:
            source = await self._source(found, job, charge)
        except PagodaError as error:
            if error.code is ErrorCode.NOT_FOUND and reader.at is None:
                message = "the answer kept for this Idempotency-Key has just been removed; try again"
                raise PagodaError(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0) from error
            raise
        with source.reader(reader.resumes) if isinstance(source, Live) else nullcontext():
            async with self._read(found, source.job, source.tape, dialect, reader) as writer:
                yield writer

    async def _source(self, found: Found, job: Job | None, charge: Callable[[str], Charge]) -> Live | Ended:
        """The live run here, the stored answer, or a new run; looks again if another gateway changes the ticket."""
        life = "" if job is not None else secrets.token_hex(4)
        while True:
            if (live := self._running(found)) is not None:
                self._on_read("joined")
                return live
            if job is None:
                found = await self._there(found)
            job = job or decoded(found.ticket.job_id, await self._kept.job(found), Job)
            if (tape := await self._answered(found)) is not None:
                self._on_read("repeated")
                return Ended(job, tape)
            try:
                live = await self._begun(found, job, life, charge(job.model))
            except Conflict:
                job = None
            else:
                self._on_read("run again" if life else "begun")
                return live

    async def _there(self, found: Found) -> Found:
        """Its current version. Raises PagodaError NOT_FOUND if it was deleted."""
        now = await self._kept.find(found.name, found.owner)
        if now is None or now.ticket.job_id != found.ticket.job_id:
            raise not_found(found.name)
        return now

    def _running(self, found: Found) -> Live | None:
        live = self._live.get(found.name)
        return live if live is not None and live.job.id == found.ticket.job_id and live.why is None else None

    @asynccontextmanager
    async def _read(
        self, found: Found, job: Job, tape: Tape, dialect: Dialect[Any], reader: Reader
    ) -> AsyncIterator[Writer]:
        model = self._ctx.catalogue.of_job(job.model, job.adapter)
        job = msgspec.structs.replace(job, due_at=reader.due_at)
        async with aclosing(Run(job, model.text, lambda usage, outcome: None)) as run:
            await run.in_time(tape.started())
            await run.attach(tape, tape.fingerprint)
            marks = None
            if found.ticket.stream:
                num_choices = sum(len(part.choices) for part in run.parts)
                try:
                    marks = Marks(found.name, tape, num_choices, reader.at)
                except ValueError as error:
                    raise InvalidParams([Problem("Last-Event-ID", str(error))]) from error
            yield dialect.writer(self._ctx, run, marks)

    async def _answered(self, found: Found) -> Tape | None:
        if not found.ticket.answered or not (kept := await self._kept.answer(found)):
            return None
        try:
            return Tape.of(found.ticket.job_id, kept)
        except msgspec.DecodeError:
            logger.exception("the stored answer of %s cannot be read and is generated again", found.name)
            return None

    # Running

    async def _begun(self, found: Found, job: Job, life: str, charge: Charge) -> Live:
        """Raises PagodaError IN_PROGRESS, OVERLOADED, and Conflict if the ticket has changed since it was found."""
        if found.ticket.runner != self._holder:
            claimed = await self._kept.claim(found.name, self._holder, times.TICKET_LEASE_S)
            if not claimed and not found.ticket.stream:
                message = "another gateway is answering the request with this Idempotency-Key; try again"
                raise PagodaError(ErrorCode.IN_PROGRESS, message, retry_after_s=times.RESPONSE_SWEEP_S)
        if found.ticket.runner != self._holder or found.ticket.ended_at:
            found = await self._kept.change(found, runner=self._holder, ended_at=0.0)
        so_far = await self._kept.handed_over(found) if life else b""
        if (live := self._running(found)) is not None:
            return live  # another request was quicker
        holding = self._ctx.memory.holding(f"ticket {found.owner}")
        try:
            holding.grow_to(held_bytes(job) + BYTES_PER_TOKEN * job.num_prompt_tokens)
        except PagodaError:
            await self._tell_end(found)
            raise
        crowded = len(self._live) >= self._ctx.config.max_background_responses
        live = self._live[found.name] = Live(found, job, life, holding, 0.0 if crowded else self._grace_s)
        if so_far:
            with suppress(msgspec.DecodeError):
                live.tape = Tape.begun(job.id, life, so_far)
        live.task = asyncio.create_task(self._to_its_end(live, charge), name=found.name)
        self._tasks.add(live.task)
        live.task.add_done_callback(self._tasks.discard)
        return live

    async def _to_its_end(self, live: Live, charge: Charge) -> None:
        claiming = asyncio.create_task(self._keep_claim(live))
        told, live.begun = False, True
        try:
            if live.why is not None:
                raise asyncio.CancelledError
            async with running(self._ctx, live.job, live.found.name, charge, live.tape.recording) as run:
                live.tape.start(run.fingerprint)
                while await run.next():
                    pass
            live.tape.end()
            told = await self._keep_answer(live)
        except asyncio.CancelledError:
            live.tape.fail(live.why or PagodaError(ErrorCode.UNAVAILABLE, "the gateway is shutting down"))
            if live.why is None:
                raise
        except PagodaError as error:
            refused = live.is_new and not live.tape.was_started and not error.status.retryable
            live.tape.fail(error)
            if refused:  # the client may correct the request under the same key
                with suppress(PagodaError):
                    self._room.freed(live.found.owner, await self._kept.delete(live.found))
        except Exception as error:  # noqa: BLE001 - readers wait for an ending
            live.tape.fail(internal(error, {"state": {"request_id": live.job.id}}))
        finally:
            claiming.cancel()
            live.holding.release()
            if self._live.get(live.found.name) is live:
                del self._live[live.found.name]
            if not told:
                await self._tell_end(live.found)
            with suppress(PagodaError):
                await self._kept.release(live.found.name, self._holder)

    async def _tell_end(self, found: Found) -> None:
        """Record the end of a run without an answer, unless another gateway runs it."""
        with suppress(PagodaError, Conflict):
            await self._kept.ended(found)

    async def _keep_answer(self, live: Live) -> bool:
        """False if it cannot be stored; then it is generated again when a client asks for it."""
        if live.tape.num_numbers > MAX_APPEND_BYTES:
            return False
        answer = live.tape.dump()
        with suppress(PagodaError, Conflict):
            async with self._room.taking(live.found.owner, len(answer), number=0):
                return await self._kept.keep_answer(live.found, answer)
        return False

    async def _keep_claim(self, live: Live) -> None:
        """Renew the claim; end the run if it was deleted, or if it has no readers here and another gateway runs it.
        Write the ticket anew if the store has lost it."""
        while True:
            with suppress(PagodaError):
                await self._kept.claim(live.found.name, self._holder, times.TICKET_LEASE_S)
            await asyncio.sleep(times.TICKET_LEASE_S / 3)
            with suppress(PagodaError):
                found = await self._kept.find(live.found.name, live.found.owner)
                if found is None or found.ticket.job_id != live.job.id:
                    if await self._kept.is_forgotten(live.job.id):
                        return live.stop(PagodaError(ErrorCode.CANCELLED, "the stream was deleted"))
                    elif found is None:
                        await self._written_again(live)
                elif found.ticket.runner != self._holder and not live.num_readers:
                    return live.stop(PagodaError(ErrorCode.CANCELLED, "another gateway has taken over this stream"))


def _same(found: Found, named: Named) -> Found:
    """Raises PagodaError KEY_REUSED."""
    if found.ticket.digest != named.digest:
        message = "this Idempotency-Key was used with another request; a repeated one has the same path and body"
        raise PagodaError(ErrorCode.KEY_REUSED, message, "Idempotency-Key")
    return found


class _Outside(Exception):
    """A failure that does not come from the store."""

    def __init__(self, error: PagodaError) -> None:
        super().__init__()
        self.error = error


async def _outside(work: Awaitable[Job]) -> Job:
    try:
        return await work
    except PagodaError as error:
        raise _Outside(error) from error
