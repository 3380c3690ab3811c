"""One `Engine.Session` stream from connecting to its end; it knows nothing of open requests or of resuming them.

Each session has its own channel: no connection state outlives it, so a restarted engine core is found as fast as a new
one. A working connection ends only by silence, measured in time that this process lived through. gRPC's keepalive is
not used, because it could not tell that it was the gateway that slept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn, TypeAlias

import grpc

from pagoda_gateway.engine.report import EngineReport, WorkerReport
from pagoda_proto import times
from pagoda_proto.addresses import check_host_port, check_socket_path
from pagoda_proto.channel import MAX_FRAME_BYTES
from pagoda_proto.engine.frames import joined, parted
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import AdminStub, EngineStub
from pagoda_proto.keys import TLS_SERVER_NAME, load_tls
from pagoda_proto.records import OLDEST_SESSION_PROTOCOL_KEY, SESSION_PROTOCOL_KEY, SESSION_SPOKEN
from pagoda_proto.times import LivedClock

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ClientFrame, pb.ServerFrame]"

METADATA = (
    (SESSION_PROTOCOL_KEY, str(SESSION_SPOKEN.newest)),
    (OLDEST_SESSION_PROTOCOL_KEY, str(SESSION_SPOKEN.oldest)),
)
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)

logger = logging.getLogger(__name__)


class EngineAddress:
    """Where an engine core listens: `unix:/path` or `host:port`; beyond loopback, the latter needs keys in `keys_dir`.

    Attributes:
        keys: The link's keys, None if it has none.

    Raises:
        ValueError: another kind of address, or one that needs keys and has none.
        KeyFileError: the keys cannot be used.
    """

    def __init__(self, address: str, keys_dir: str = "") -> None:
        self.text = address
        self.keys = load_tls(keys_dir) if keys_dir and not address.startswith("unix:") else None
        if address.startswith("unix:"):
            check_socket_path(address, address.removeprefix("unix:"))
        elif "/" in address:
            raise ValueError(f"address {address!r} must be unix:/path or host:port")
        else:
            check_host_port(address, address, keyed=self.keys is not None)

    @classmethod
    def several(cls, addresses: str, keys_dir: str = "") -> list[EngineAddress]:
        """Parse one or more addresses, separated by commas. Raises ValueError also for duplicates."""
        texts = [text.strip() for text in addresses.split(",")]
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} stands twice")
        return [cls(text, keys_dir) for text in texts]

    def channel(self) -> grpc.aio.Channel:
        if self.keys is None:
            return grpc.aio.insecure_channel(self.text, options=CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(self.keys.ca, self.keys.private_key, self.keys.certificate)
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_SERVER_NAME))
        return grpc.aio.secure_channel(self.text, credentials, options=options)


class SessionEnded(Exception):
    """The session is over; the text says how."""


class Session:
    """One stream to one engine core. Call `send` at any time, `run` once, and `tick` regularly while it runs."""

    def __init__(self, address: EngineAddress, clock: LivedClock, silent_s: float) -> None:
        self._address = address
        self._clock = clock
        self._silent_s = silent_s
        self._heard_at = clock.now()
        self._silent = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._protocol = SESSION_SPOKEN.oldest  # until the engine core names the version both speak
        self._outbox: asyncio.Queue[pb.ClientFrame] = asyncio.Queue()

    def send(self, frame: pb.ClientFrame) -> None:
        self._outbox.put_nowait(frame)

    def tick(self) -> None:
        """End a session that was silent for `silent_s` of our own time: a stopped process still accepts connections."""
        if self._clock.now() - self._heard_at >= self._silent_s:
            self._silent.set()

    async def report(self) -> EngineReport | None:
        """Ask for a report on the stream's connection; None without one."""
        return None if self._channel is None else await ask_report(self._channel)

    async def run(self, on_frame: Callable[[pb.ServerFrame], None]) -> NoReturn:
        """Pass every frame to `on_frame` until the stream ends, breaks, is refused or falls silent.

        Raises:
            SessionEnded: always, in the end.
        """
        async with self._address.channel() as channel:
            self._channel = channel
            call = EngineStub(channel).Session(metadata=METADATA)
            parts = (self._read(call, on_frame), self._write(call), self._watch())
            tasks = [asyncio.create_task(part, name="engine-session-part") for part in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._channel = None
                for task in tasks:
                    task.cancel()
                call.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        raise SessionEnded(", ".join(sorted({_ending(task) for task in done})))

    async def _read(self, call: Call, on_frame: Callable[[pb.ServerFrame], None]) -> None:
        async for message in call:
            self._heard_at = self._clock.now()
            for frame in parted(message):
                if frame.HasField("load"):
                    self._protocol = frame.load.protocol
                on_frame(frame)

    async def _write(self, call: Call) -> None:
        while True:
            frames = [await self._outbox.get()]
            while not self._outbox.empty():
                frames.append(self._outbox.get_nowait())
            for message in joined(frames, self._protocol):
                await call.write(message)

    async def _watch(self) -> None:
        await self._silent.wait()
        raise TimeoutError(f"silent for {self._silent_s:g} s")


def _ending(task: asyncio.Task[None]) -> str:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return "ended by the engine core"
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or f"lost: {error.code().name}"
    if not isinstance(error, TimeoutError | OSError | asyncio.InvalidStateError):
        logger.error("engine core session: unexpected %s", type(error).__name__, exc_info=error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def ask_report(channel: grpc.aio.Channel) -> EngineReport | None:
    """Ask for a report on a session's connection; None if the engine core does not answer in time."""
    admin = AdminStub(channel)
    questions = ((admin.ListWorkers, pb.ListWorkersRequest()), (admin.GetStats, pb.GetStatsRequest()))
    calls = [asyncio.ensure_future(method(asked, timeout=times.REPORT_WAIT_S)) for method, asked in questions]
    try:
        await asyncio.wait(calls)  # closing the channel cancels its calls: that must not cancel our task
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
