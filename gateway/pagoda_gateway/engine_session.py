"""One `Engine.Session` stream from connecting to its end; who is open on it and what to resume is not known here.

A channel per session: no connection state outlives it, so a restarted engine core is found as fast as a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc

from pagoda_proto.addresses import check_host_port
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1.engine_pb2_grpc import EngineStub
from pagoda_proto.keys import TLS_SERVER_NAME, load_tls

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


class EngineAddress:
    """Where the engine core listens: `unix:/path`, or `host:port`, which off loopback needs the keys in `keys_dir`.

    Raises:
        ValueError: another kind of address, or one that needs keys.
        KeyFileError: the keys cannot be read.
    """

    def __init__(self, address: str, keys_dir: str = "") -> None:
        self._address = address
        self._keys = load_tls(keys_dir) if keys_dir and not address.startswith("unix:") else None
        if not address.startswith("unix:"):
            check_host_port(address, address, keyed=self._keys is not None)

    def channel(self) -> grpc.aio.Channel:
        if self._keys is None:
            return grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(self._keys.ca, self._keys.private_key, self._keys.certificate)
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_SERVER_NAME))
        return grpc.aio.secure_channel(self._address, credentials, options=options)


async def session_frames(
    address: EngineAddress, outbox: asyncio.Queue[pb.ClientFrame]
) -> AsyncGenerator[pb.ServerFrame, None]:
    """The engine core's frames; what is put into `outbox` meanwhile is sent. Close it to end the session.

    Raises:
        grpc.aio.AioRpcError: no connection, or it broke.
        TimeoutError: nothing came for `SILENCE_S`.
    """
    async with address.channel() as channel:
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
