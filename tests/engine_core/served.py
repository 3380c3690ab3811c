"""An engine core served as in its own process, and the gateway's end of a session with it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
from tests.session_frames import FrameReader

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.server import serve
from pagoda_proto import convert
from pagoda_proto.engine.frames import parted
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc as pb_grpc
from pagoda_proto.records import Delta, RequestRecord

WAIT_S = 120


class Server:
    """`serve` in this event loop, and a channel to it."""

    def __init__(self, directory: Path, **config: object) -> None:
        self.socket = directory / "e.sock"
        self.config = EngineConfig(listen=f"unix:{self.socket}", worker_endpoint=f"ipc://{directory}/w.sock", **config)
        self.stop = asyncio.Event()
        self.events: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.task = asyncio.create_task(serve(self.config, self.events.put_nowait, self.stop))
        self.channel = grpc.aio.insecure_channel(
            self.config.listen, options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        )
        self.engine = pb_grpc.EngineStub(self.channel)
        self.admin = pb_grpc.AdminStub(self.channel)

    async def event(self, name: str) -> dict[str, object]:
        async with asyncio.timeout(WAIT_S):
            while True:
                event = await self.events.get()
                if event["event"] == name:
                    return event

    async def workers(self, count: int) -> None:
        while (await self.event("workers"))["ready"] != count:
            pass

    async def close(self) -> None:
        await self.channel.close()
        self.stop.set()
        async with asyncio.timeout(10):
            await self.task


class Session:
    """A gateway's end of a session."""

    def __init__(self, server: Server, channel: grpc.aio.Channel | None = None) -> None:
        self.frames: asyncio.Queue[pb.ClientFrame | None] = asyncio.Queue()
        self.call = pb_grpc.EngineStub(channel or server.channel).Session(self._requests())
        self.reader = FrameReader()
        self._frames: deque[pb.ServerFrame] = deque()  # from a message that was read
        self.deltas: list[Delta] = []
        self.answers: list[pb.ServerFrame] = []
        self.loads: list[pb.Load] = []
        self.ended: dict[str, Delta] = {}

    async def _requests(self) -> AsyncIterator[pb.ClientFrame]:
        while (frame := await self.frames.get()) is not None:
            yield frame

    def submit(self, record: RequestRecord, attempt: int = 0) -> None:
        submit = pb.Submit(record=convert.record_to_pb(record), attempt=attempt)
        self.frames.put_nowait(pb.ClientFrame(submit=submit))

    def abort(self, request_id: str, choices: tuple[int, ...] = ()) -> None:
        self.frames.put_nowait(pb.ClientFrame(abort=pb.Abort(request_id=request_id, choices=choices)))

    async def read(self) -> pb.ServerFrame | None:
        if not self._frames:
            async with asyncio.timeout(WAIT_S):
                message = await self.call.read()
            if message is grpc.aio.EOF:
                return None
            self._frames.extend(parted(message))
        frame = self._frames.popleft()
        deltas = self.reader.deltas(frame)
        if frame.HasField("outputs"):
            self.deltas += deltas
            self.ended |= {delta.request_id: delta for delta in deltas if delta.ends_request}
        elif frame.HasField("load"):
            self.loads.append(frame.load)
        else:
            self.answers.append(frame)
        return frame

    async def until(self, *request_ids: str) -> None:
        while not set(request_ids) <= set(self.ended):
            assert await self.read() is not None
            assert not any(frame.HasField("rejected") for frame in self.answers), self.answers

    async def answer(self) -> pb.ServerFrame:
        while not self.answers:
            assert await self.read() is not None
        return self.answers.pop(0)

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        tokens: list[int] = []
        for delta in self.deltas:
            if (delta.request_id, delta.choice) == (request_id, choice):
                assert delta.result.first_index == len(tokens)
                tokens += delta.result.token_ids
        return tokens


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            pass
