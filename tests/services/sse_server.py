"""A small server that streams made-up completions, to test clients of servers: real sockets, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SseServer:
    """Answers every POST with as many tokens as it asks for. The first answers get the statuses of `failures`."""

    failures: list[int] = field(default_factory=list)
    close_after_answer: bool = False
    omit_done: bool = False
    owned_by: str = ""
    answered: asyncio.Event | None = None  # answers of a stream wait for it
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    connections: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.headers.append(head)
                await self._answer(head, reader, writer)
                if self.close_after_answer:
                    break

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET /v1/models"):
            body = json.dumps({"data": self._models()}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        length = int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.asked.set()
        if self.failures:
            text = b'{"error": "no"}'
            writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (self.failures.pop(0), len(text)) + text)
            return
        if self.answered is not None:
            await self.answered.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in self._events(body, chat=b"/chat/" in head.split(b"\r\n", 1)[0]):
            data = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _models(self) -> list[dict[str, str]]:
        if self.owned_by:
            return [{"id": "served", "owned_by": self.owned_by}]
        return [{"id": "first-model"}, {"id": "second-model"}]

    def _events(self, body: dict[str, Any], chat: bool) -> list[bytes]:
        count = body.get("max_tokens", 3)
        prompt = body["messages"] if chat else body["prompt"]
        pieces: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}] if chat else []
        pieces += [{"delta": {"content": "word "}} if chat else {"text": "word "} for _ in range(count)]
        pieces.append({"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"})
        events = [json.dumps({"choices": [piece]}).encode() for piece in pieces]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        events.append(json.dumps({"choices": [], "usage": usage}).encode())
        return events if self.omit_done else [*events, b"[DONE]"]


@contextlib.asynccontextmanager
async def serving(server: SseServer) -> AsyncIterator[SseServer]:
    async with listening(server.handle) as url:
        server.url = url
        yield server


Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(handle: Handle) -> AsyncIterator[str]:
    """Serve a free port with `handle` and yield its URL; every connection is closed at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await handle(reader, writer)

    listener = await asyncio.start_server(run, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)  # transports close in the turn after they are told to
