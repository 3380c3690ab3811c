"""A mailbox connects the loop thread to a stream: filled once per step, emptied as fast as the peer reads."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import msgspec

from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.sessions.outbox import Outbox
from pagoda_proto import convert
from pagoda_proto.engine.frames import joined, parted
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc as pb_grpc
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import (
    OLDEST_SESSION_PROTOCOL_KEY,
    SESSION_PROTOCOL_KEY,
    SESSION_SPOKEN,
    Delta,
    Load,
    NextTokens,
    RequestRecord,
)
from pagoda_proto.steps import Versions
from pagoda_proto.times import LOAD_KEEPALIVE_S, RESTART_DUE_S

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.1
CODE_TRAILER, RETRY_TRAILER = "pagoda-code", "pagoda-retry-after-ms"


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: PagodaError) -> NoReturn:
    """End a call with the error's status and, if known, when to retry. The only place where codes become statuses."""
    trailers = {CODE_TRAILER: error.code.value}
    if error.retry_after_s > 0:
        trailers[RETRY_TRAILER] = str(math.ceil(1000 * error.retry_after_s))
    await context.abort(grpc.StatusCode[error.status.grpc], error.message, tuple(trailers.items()))
    raise error  # not reached: `abort` raises


class Mailbox:
    """The engine's Sink for one stream. The Sink's methods run in the loop thread, all others in asyncio's.

    `on_overfull` is called when the reader has fallen too far behind; from then on nothing is kept for it. The stream
    uses protocol version `protocol`.
    """

    def __init__(self, protocol: int = SESSION_SPOKEN.newest) -> None:
        self.protocol = protocol
        self.outbox = Outbox()
        self.overfull = False
        self.on_overfull: Callable[[], object] = lambda: None
        self.refusal: PagodaError | None = None  # the last one, for a stream of a single request
        self._loop = asyncio.get_running_loop()
        self._posted: deque[Callable[[], None]] = deque()
        self._called = False
        self._changed = asyncio.Event()
        self._closed = False

    def accepted(self, request_id: str, attempt: int, stream: int) -> None:
        self._post(lambda: self.outbox.accepted(request_id, attempt, stream))

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        self._post(partial(self.reject, request_id, attempt, error, retry_after_s))

    def next_tokens(self, tokens: NextTokens) -> None:
        self._post(lambda: self.outbox.next_tokens(tokens))

    def deltas(self, deltas: list[Delta]) -> None:
        self._post(lambda: self.outbox.deltas(deltas))

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        self._post(partial(self._migrate, request_id, attempt, reason))

    def reject(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float = 0.0) -> None:
        self.refusal = error.anew(retry_after_s)
        self.outbox.rejected(request_id, attempt, error, retry_after_s)
        self._changed.set()

    def _migrate(self, request_id: str, attempt: int, reason: str) -> None:
        self.refusal = PagodaError(ErrorCode.UNAVAILABLE, reason, retry_after_s=RESTART_DUE_S)
        self.outbox.migrate(request_id, attempt)

    def load(self, load: Load) -> None:
        self.outbox.load(msgspec.structs.replace(load, protocol=self.protocol))
        self._changed.set()

    def close(self) -> None:
        """Nothing more comes: the waiting writer takes what is left and ends."""
        self._closed = True
        self._changed.set()

    async def wait(self) -> bool:
        """Wait until there may be something to take; False if nothing comes after that."""
        await self._changed.wait()
        self._changed.clear()
        return not self._closed

    def _post(self, change: Callable[[], None]) -> None:
        self._posted.append(change)
        if self._called:
            return
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the event loop and all streams are closed
            self._posted.clear()

    def _deliver(self) -> None:
        self._called = False  # first, so that later posts schedule another call
        while self._posted:
            change = self._posted.popleft()
            if not self.overfull:
                change()
        if self.outbox.overfull and not self.overfull:
            self.overfull = True
            self.outbox = Outbox()
            self.on_overfull()
        self._changed.set()


class LoadBoard:
    """Sends the engine core's load to every session and to `watcher`: when it changes, rate-limited, and at least once
    per LOAD_KEEPALIVE_S."""

    def __init__(self, engine: EngineCore, watcher: Callable[[Load], None] = lambda load: None) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._called = False
        self._mailboxes: set[Mailbox] = set()
        self._watcher = watcher

    def join(self, mailbox: Mailbox) -> None:
        self._mailboxes.add(mailbox)
        mailbox.load(self._engine.load())

    def leave(self, mailbox: Mailbox) -> None:
        self._mailboxes.discard(mailbox)

    @property
    def sessions(self) -> tuple[Mailbox, ...]:
        return tuple(self._mailboxes)

    def changed(self) -> None:
        """The load has changed. Called by the engine's loop thread."""
        if self._called:
            return
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            return

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOAD_KEEPALIVE_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            self._called = False
            load = self._engine.load()
            for tell in (self._watcher, *(mailbox.load for mailbox in self._mailboxes)):
                tell(load)
            await asyncio.sleep(LOAD_INTERVAL_S)


class EngineService(pb_grpc.EngineServicer):
    """The `Engine` service: sessions of gateways, in one of the versions `spoken`, and single calls of any client."""

    def __init__(self, engine: EngineCore, board: LoadBoard, spoken: Versions = SESSION_SPOKEN) -> None:
        self._engine = engine
        self._board = board
        self._spoken = spoken

    async def Session(
        self, request_iterator: AsyncIterator[pb.ClientFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        mailbox = Mailbox(await _protocol(context, self._spoken))
        self._board.join(mailbox)
        reader = asyncio.create_task(self._read(request_iterator, mailbox))
        writer = asyncio.create_task(self._write(context, mailbox))
        reader.add_done_callback(lambda _: mailbox.close())
        mailbox.on_overfull = writer.cancel
        try:
            await asyncio.wait((writer,))
        finally:
            self._board.leave(mailbox)
            self._engine.abandon(mailbox)
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        error = _session_error(mailbox, reader)
        if error is not None:
            await abort_with(context, error)

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], mailbox: Mailbox) -> None:
        more = True
        while more:
            more = await mailbox.wait()
            while frames := mailbox.outbox.take():
                for message in joined(frames, mailbox.protocol):
                    await context.write(message)

    async def _read(self, messages: AsyncIterator[pb.ClientFrame], mailbox: Mailbox) -> None:
        async for message in messages:
            for frame in parted(message):
                if frame.HasField("submit"):
                    self._submit(frame.submit, mailbox)
                elif frame.HasField("abort"):
                    self._engine.abort(frame.abort.request_id, tuple(frame.abort.choices), mailbox)

    def _submit(self, submit: pb.Submit, mailbox: Mailbox) -> None:
        try:
            record = record_from(submit.record)
            resume = convert.resume_from_pb(submit.resume)
        except PagodaError as error:
            mailbox.reject(submit.record.request_id, submit.attempt, error)
        else:
            self._engine.submit(record, mailbox, submit.attempt, resume)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        mailbox = Mailbox()
        try:
            self._engine.submit(complete(record_from(request.record)), mailbox)
            async for delta in self._deltas(mailbox):
                yield pb.GenerateResponse(delta=convert.delta_to_pb(delta))
                if delta.error_code is not None and delta.ends_request:
                    raise PagodaError(delta.error_code, delta.error_message)
        except PagodaError as error:
            await abort_with(context, error)
        finally:
            self._engine.abandon(mailbox)

    async def _deltas(self, mailbox: Mailbox) -> AsyncIterator[Delta]:
        while True:
            await mailbox.wait()
            for delta in mailbox.outbox.take_deltas():
                yield delta
                if delta.ends_request:
                    return
            if mailbox.overfull:
                raise PagodaError(ErrorCode.OVERLOADED, "this stream was not read for too long")
            if mailbox.refusal is not None:
                raise mailbox.refusal


async def _protocol(context: grpc.aio.ServicerContext[Any, Any], spoken: Versions) -> int:
    """The newest version that both sides speak. Aborts the call if there is none."""
    said = dict(context.invocation_metadata() or ())
    newest = str(said.get(SESSION_PROTOCOL_KEY, spoken.newest))
    oldest = str(said.get(OLDEST_SESSION_PROTOCOL_KEY, newest))
    agreed = spoken.agreed(Versions(int(oldest), int(newest))) if _is_version(oldest) and _is_version(newest) else None
    if agreed is not None:
        return agreed
    theirs = newest if newest == oldest else f"{oldest} to {newest}"
    message = f"session protocol {spoken} is spoken here, this gateway speaks {theirs[:64]!a}"
    log.warning("refused a session: %s", message)
    trailers = ((CODE_TRAILER, ErrorCode.PROTOCOL_ERROR.value),)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message, trailers)
    raise PagodaError(ErrorCode.PROTOCOL_ERROR, message)  # not reached: `abort` raises


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _session_error(mailbox: Mailbox, reader: asyncio.Task[None]) -> PagodaError | None:
    """The error that ended a session, if one did."""
    if mailbox.overfull:
        return PagodaError(ErrorCode.OVERLOADED, "this session was not read for too long")
    error = None if reader.cancelled() else reader.exception()
    if error is None:
        return None
    log.warning("a session ended because of a message from its gateway: %s: %s", type(error).__name__, error)
    return PagodaError(ErrorCode.INVALID_ARGUMENT, "a frame could not be read")


def record_from(message: pb.RequestRecord) -> RequestRecord:
    """Raises InvalidParams, or PagodaError INVALID_ARGUMENT if a struct cannot hold the record's values."""
    try:
        return convert.record_from_pb(message)
    except (ValueError, msgspec.ValidationError) as error:
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, f"bad record: {error}") from error


def complete(record: RequestRecord) -> RequestRecord:
    """Fill in what a plain gRPC client may omit: the request id and the seed in force."""
    task = record.task
    seed = task.params.seed if task.params.seed is not None else task.seed or secrets.randbits(64)
    request_id = record.request_id or secrets.token_hex(16)
    return msgspec.structs.replace(record, request_id=request_id, task=msgspec.structs.replace(task, seed=seed))
