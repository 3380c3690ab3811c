"""A server that shuts down accepts no more connections, even though other processes hold its listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable

import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.gateway.http_fakes import limited, parse

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.listening import bind
from pagoda_gateway.http.protocol import ConnectionGuard
from pagoda_gateway.http.server import HttpServer, uvicorn_config

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
def test_during_the_drain_who_comes_is_refused_and_who_is_there_is_served(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with bind("127.0.0.1", 0) as held, asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(_drained(held, held.dup())) == (200, b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n")
        with held.dup() as next_one:
            next_one.listen()
            socket.create_connection(held.getsockname()).close()


@LOOPS
def test_who_has_no_file_left_to_open_leaves_in_order(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """As when more connections arrive than its limit of open files allows."""
    with bind("127.0.0.1", 0) as held, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_left_without_files(held.dup()))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(held.getsockname())


async def _left_without_files(listener: socket.socket) -> None:
    server = _server(nothing)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.listening.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # files that are open stay open
    try:
        server.should_exit = True
        await serving
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that is never called."""


def _server(app: ASGIApp) -> HttpServer:
    config = GatewayConfig()
    return HttpServer(uvicorn_config(limited(app, config), config, ConnectionGuard(config, lambda: None)))


async def _drained(held: socket.socket, listener: socket.socket) -> tuple[int, bytes]:
    """Status and body of a stream that runs while its server shuts down."""
    go_on = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"cd", "more_body": False})

    server = _server(stream)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.listening.wait()
    reader, writer = await asyncio.open_connection(*held.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
    begun = await reader.readuntil(b"ab\r\n")
    server.should_exit = True
    await _until_refused(held)
    assert not serving.done()
    go_on.set()
    status, _, body = parse(begun + await reader.read())
    await _close(writer)
    await serving
    return status, body


async def _until_refused(held: socket.socket) -> None:
    """Connect until refused: a drained server accepts no connection to wait for an answer."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection(*held.getsockname())
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # connected just as listening ended
                continue
            await _close(writer)
            await asyncio.sleep(0.01)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # the server closed first
        await writer.wait_closed()
