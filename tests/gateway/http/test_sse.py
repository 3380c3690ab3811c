"""The event stream by itself: when it opens, how it ends, how it notices that its client has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import make_gateway, play
from tests.gateway.http_fakes import running_http

from pagoda_gateway.api.encoding import DONE, Events, event
from pagoda_gateway.http.sse import ClientGone, EventStream, keep_body_sender, until_disconnect
from pagoda_proto.errors import ErrorCode, PagodaError


class Client:
    """An ASGI client: records what it receives, and leaves when `left` is set."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.got_body = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body"):
            self.got_body.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def read(self, events: AsyncGenerator[bytes, None], ping_interval_s: float = 60.0) -> None:
        async with asyncio.timeout(10):
            await EventStream(events, ping_interval_s)({"type": "http", "state": {}}, self.receive, self.send)


def test_an_event_is_one_line_of_json() -> None:
    data = event({"text": 'a\n"é🙂'})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert json.loads(data.removeprefix(b"data: ")) == {"text": 'a\n"é🙂'}


@pytest.mark.parametrize("after", [{}, {"usage": None}])
def test_events_with_fields_in_common_are_those_of_the_whole_mapping(after: dict[str, Any]) -> None:
    before = {"id": 'a"b', "created": 1}
    events = Events(before, "choices", after)
    for value in ([], [{"text": 'é\n"', "logprobs": None}]):
        assert events.event(value) == event({**before, "choices": value, **after})


async def test_the_body_goes_past_what_stands_between() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    client, between = Client(), Client()
    scope: dict[str, Any] = {"type": "http", "state": {}}
    keep_body_sender(scope, client.send)
    async with asyncio.timeout(10):
        await EventStream(events(), 60.0)(scope, client.receive, between.send)
    assert [message["type"] for message in between.messages] == ["http.response.start"]
    assert client.body == b"data: 1\n\n"
    assert client.messages[-1]["more_body"] is False


async def test_it_opens_with_the_first_event_and_ends_the_response() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        assert client.messages == []
        yield b"data: 1\n\n"
        assert client.messages[0]["status"] == 200
        yield DONE

    client = Client()
    await client.read(events())
    assert client.body == b"data: 1\n\n" + DONE
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    headers = dict(client.messages[0]["headers"])
    assert headers[b"cache-control"] == b"no-cache"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PagodaError(ErrorCode.OVERLOADED, "full"), 503, "overloaded"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_an_early_failure_is_a_response_a_late_one_an_event(error: Exception, status: int, code: str) -> None:
    async def events(late: bool) -> AsyncGenerator[bytes, None]:
        if late:
            yield b"data: 1\n\n"
        raise error

    early, late = Client(), Client()
    await early.read(events(False))
    assert early.messages[0]["status"] == status
    assert json.loads(early.body)["error"]["code"] == code
    await late.read(events(True))
    assert late.messages[0]["status"] == 200
    first, last = late.body.decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert first == "data: 1"
    assert late.messages[-1]["more_body"] is False
    assert b"secret" not in early.body + late.body


async def test_pings_open_a_silent_stream_and_stop_with_it() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await client.got_body.wait()
        raise PagodaError(ErrorCode.UNAVAILABLE, "gone")
        yield b""

    client = Client()
    await client.read(events(), ping_interval_s=0.01)
    assert client.messages[0]["status"] == 200
    assert client.body.startswith(b": ping\n\n")
    assert b'"unavailable"' in client.body
    num_messages = len(client.messages)
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert len(client.messages) == num_messages


async def test_without_an_interval_nothing_is_pinged() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.1)
        yield b"data: 1\n\n"

    client = Client()
    await client.read(events(), ping_interval_s=0.0)
    assert client.body == b"data: 1\n\n"


async def test_a_client_that_leaves_closes_the_events() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            client.left.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # clean-up awaits
            closed.set()

    client = Client()
    await client.read(events())
    assert closed.is_set()


async def test_a_server_that_stops_cancels_as_usual() -> None:
    waiting = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        waiting.set()
        await asyncio.Event().wait()
        yield b""

    task = asyncio.create_task(Client().read(events()))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_until_disconnect_leaves_a_finished_block_alone() -> None:
    client = Client()
    async with until_disconnect(client.receive):
        pass
    client.left.set()
    await asyncio.sleep(0)
    with pytest.raises(ClientGone):
        async with until_disconnect(client.receive):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_real_connection_that_breaks_ends_the_generation(tmp_path: Path, stream: bool) -> None:
    gateway = make_gateway(tmp_path)
    never = asyncio.Event()
    scripted = play(gateway.ids("abc"))
    gateway.engine.script = lambda record: [*scripted(record)[:2], never]
    body = json.dumps({"prompt": "hello", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    async with asyncio.timeout(20), running_http(gateway.app, gateway.context.config) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(f"{head}\r\n\r\n".encode() + body)
        if stream:
            await reader.readuntil(b"data: ")
        await gateway.engine.submitted.wait()
        writer.close()
        await gateway.engine.generations[0].closed.wait()
