"""One `Engine.Session` stream from connecting to its end; who is open on it and what to resume is not known here.

A channel per session: no connection state outlives it, so a restarted engine core is found as fast as a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc

from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import EngineStub

SILENCE_S = 5.0  # an engine core tells its load at least every second; a stopped process still accepts connections
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)


def check_engine_address(address: str) -> str:
    """Raises ValueError unless it is a unix socket or loopback: this wire has no TLS."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost" or host == "::1" or host.startswith("127."):
        return address
    raise ValueError(f"engine must be unix:/path or host:port on loopback (no TLS on this wire), got {address!r}")


async def session_frames(address: str, outbox: asyncio.Queue[pb.ClientFrame]) -> AsyncGenerator[pb.ServerFrame, None]:
    """The engine core's frames; what is put into `outbox` meanwhile is sent. Close it to end the session.

    Raises:
        grpc.aio.AioRpcError: no connection, or it broke.
        TimeoutError: nothing came for `SILENCE_S`.
    """
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = EngineStub(channel).Session()  # type: ignore[no-untyped-call]
        writer = asyncio.create_task(_write(call, outbox), name="engine-session-writer")
        try:
            frames = aiter(call)
            while True:
                async with asyncio.timeout(SILENCE_S):
                    frame = await anext(frames, None)
                if frame is None:
                    return
                yield frame
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)


async def _write(
    call: grpc.aio.StreamStreamCall[pb.ClientFrame, pb.ServerFrame], outbox: asyncio.Queue[pb.ClientFrame]
) -> None:
    while True:
        await call.write(await outbox.get())
