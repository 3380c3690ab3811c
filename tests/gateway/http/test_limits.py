"""Limits hold on raw sockets, answer in OpenAI's error format, and affect no other client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from tests.gateway.fake_engine_core import until
from tests.gateway.http_fakes import Running, error_code, limited, parse, running_http, talk

from pagoda_gateway.clients import Caller
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.http.limits import LEAST_BYTES_PER_S, is_normal_path
from pagoda_proto.errors import ErrorCode, PagodaError

CONFIG = GatewayConfig(
    max_body_bytes=1000,
    max_headers=10,
    max_header_bytes=2000,
    header_timeout_s=0.2,
    body_timeout_s=0.2,
    keep_alive_s=1.0,
    max_connections=20,
    max_connections_per_client=12,
    slow_client_timeout_s=0.2,
    forwarded_allow_ips="",
)


class Echo:
    """Records the requests; /stream sends until its client disconnects."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.streamed = 0
        self.gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        self.calls.append((scope["path"], len(message["body"])))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if scope["path"] == "/stream":
            leaving = asyncio.create_task(self._watch(receive))
            while not self.gone.is_set():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.streamed += 65536
            await leaving
            return
        await send({"type": "http.response.body", "body": b"hello", "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.gone.set()


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def http(echo: Echo) -> AsyncIterator[Running]:
    async with running_http(limited(echo, CONFIG), CONFIG) as running:
        yield running


def get(path: str = "/", *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: h", *lines, "", ""]).encode()


def post(body: bytes, *lines: str) -> bytes:
    return "\r\n".join(["POST /p HTTP/1.1", "host: h", *lines, "", ""]).encode() + body


CLOSE = "connection: close"
MANY = [f"x-{i}: 1" for i in range(9)]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (get("/", CLOSE), 200, None),
        (get("/a.b/c..d/e%20f", CLOSE), 200, None),
        (get("/", CLOSE, *MANY[:8]), 200, None),
        (get("/", CLOSE, *MANY), 431, "headers_too_large"),
        (get("/", "x: " + "y" * 1950, CLOSE), 200, None),
        (get("/", "x: " + "y" * 2000), 431, "headers_too_large"),
        (get("/" + "y" * 9000), 431, "headers_too_large"),
        (get("/", "x: " + "y" * 100_000), 431, "headers_too_large"),
        (get("//v1/models"), 400, "invalid_argument"),
        (get("/v1/../health"), 400, "invalid_argument"),
        (get("/v1/%2e%2e/health"), 400, "invalid_argument"),
        (get("/v1%2Fmodels"), 400, "invalid_argument"),
        (get("/v1%2fmodels"), 400, "invalid_argument"),
        (get("/v1%5cmodels"), 400, "invalid_argument"),
        (get("/v1\\models"), 400, "invalid_argument"),
        (get("/v1/%00"), 400, "invalid_argument"),
        (get("/%0aadmin"), 400, "invalid_argument"),
        (get("http://h/x", CLOSE), 200, None),
        (get("http://evil/x"), 400, "invalid_argument"),
        (get("ftp://h/x"), 400, "invalid_argument"),
        (get("http://h"), 400, "invalid_argument"),
        (get("x"), 400, "invalid_argument"),
        (b"nonsense\r\n\r\n", 400, "invalid_argument"),
        (b"GET /\xff HTTP/1.1\r\nhost: h\r\n\r\n", 400, "invalid_argument"),
        (post(b"", "content-length: 1001"), 413, "request_too_large"),
        (post(b"a" * 1000, "content-length: 1000", CLOSE), 200, None),
        (post(b"3e9\r\n" + b"a" * 1001 + b"\r\n0\r\n\r\n", "transfer-encoding: chunked"), 413, "request_too_large"),
        (post(b"3e8\r\n" + b"a" * 1000 + b"\r\n0\r\n\r\n", "transfer-encoding: chunked", CLOSE), 200, None),
        (post(b"", "content-length: 0", "content-encoding: gzip"), 415, "unsupported_media_type"),
        (post(b"", "content-length: 0", "content-encoding: identity", CLOSE), 200, None),
        (post(b"a", "content-length: 5"), 408, "request_timeout"),
        (post(b"5\r\na", "transfer-encoding: chunked"), 408, "request_timeout"),
        (post(b"0\r\n\r\n", "content-length: 5", "transfer-encoding: chunked"), 400, "invalid_argument"),
        (post(b"a", "content-length: 1", "content-length: 2"), 400, "invalid_argument"),
        (post(b"a", "content-length: -1"), 400, "invalid_argument"),
        (b"GET / HTTP/1.1\r\nhost:", 408, "request_timeout"),
        (get("/", "connection: upgrade", "upgrade: websocket"), 200, None),
    ],
)
async def test_one_request(http: Running, echo: Echo, data: bytes, status: int, code: str | None) -> None:
    answer, headers, body = await talk(http.port, data)
    assert answer == status
    if code is None:
        assert body
        assert len(echo.calls) == 1
    else:
        assert error_code(body) == code
        assert headers["connection"] == "close"
        assert echo.calls == []
    assert (await talk(http.port, get("/", CLOSE)))[0] == 200


async def test_sec_31_nonsense_makes_no_line_of_log(http: Running, caplog: pytest.LogCaptureFixture) -> None:
    assert (await talk(http.port, b"nonsense\r\n\r\n"))[0] == 400
    assert caplog.records == []


async def test_head_that_never_ends_is_bounded(http: Running, echo: Echo) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"GET / HTTP/1.1\r\nx: ")
    await until(lambda: any(c._in_head for c in http.server.server_state.connections))
    writer.write(b"y" * 10_300)
    status, _, body = parse(await reader.read())
    assert (status, error_code(body)) == (431, "headers_too_large")
    writer.close()


@pytest.mark.parametrize("drip", [b"", b"\r\n"])
async def test_silence_before_a_request_closes(http: Running, drip: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(drip)
    assert await reader.read() == b""
    writer.close()


async def test_line_breaks_between_requests_do_not_keep_a_connection(http: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(get())
    await reader.readuntil(b"0\r\n\r\n")
    writer.write(b"\r\n")
    assert await reader.read() == b""
    writer.close()


async def test_dripping_heads_do_not_disturb_others(http: Running, echo: Echo) -> None:
    """Slowloris: each byte arrives in time, but the head never completes."""

    async def drip() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            writer.write(b"x")
            await asyncio.wait({reading}, timeout=0.02)
        writer.close()
        return await asyncio.gather(reading, return_exceptions=True)

    attacks = [asyncio.create_task(drip()) for _ in range(8)]
    await asyncio.sleep(0)
    assert (await talk(http.port, get("/", CLOSE)))[0] == 200
    await asyncio.gather(*attacks)
    await until(lambda: not http.server.server_state.connections)


async def test_keep_alive_and_pipelining_go_on(http: Running, echo: Echo) -> None:
    status, _, _ = await talk(http.port, get("/a") + get("/b") + post(b"a", "content-length: 1") + get("/c", CLOSE))
    assert status == 200
    assert [path for path, _ in echo.calls] == ["/a", "/b", "/p", "/c"]


async def test_a_large_upload_still_gets_its_answer(http: Running, echo: Echo) -> None:
    body = b"a" * (3 * 1024 * 1024)
    status, _, answer = await talk(http.port, post(body, f"content-length: {len(body)}"))
    assert (status, error_code(answer)) == (413, "request_too_large")


async def test_connections_of_one_client_are_bounded(echo: Echo) -> None:
    config = replace(CONFIG, header_timeout_s=5.0)
    async with running_http(limited(echo, config), config) as http:
        connections = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(12)]
        for _, writer in connections:
            writer.write(b"G")
        await until(lambda: len(http.server.server_state.connections) == 12)
        status, headers, body = await talk(http.port, b"")
        assert (status, error_code(body)) == (503, "overloaded")
        assert "--forwarded-allow-ips" in json.loads(body)["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        for _, writer in connections:
            writer.close()
        await until(lambda: not http.server.server_state.connections)
        assert (await talk(http.port, get("/", CLOSE)))[0] == 200


async def test_requests_behind_a_proxy_are_counted_by_their_own_clients() -> None:
    config = GatewayConfig(max_connections_per_client=1, forwarded_allow_ips="127.0.0.0/8")
    echo = Echo()

    def ask(path: str, client: str) -> bytes:
        return get(path, f"x-forwarded-for: {client}", CLOSE)

    async with running_http(limited(echo, config), config) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(ask("/stream", "1.1.1.1"))
        await reader.readexactly(100_000)
        status, _, body = await talk(http.port, ask("/", "1.1.1.1"))
        assert (status, error_code(body)) == (503, "overloaded")
        assert (await talk(http.port, ask("/", "2.2.2.2")))[0] == 200
        writer.close()
        await echo.gone.wait()
        await until(lambda: not http.server.server_state.connections)
        assert (await talk(http.port, ask("/", "1.1.1.1")))[0] == 200


async def by_key(scope: Any) -> Caller:
    """Identifies callers by a header instead of their address, and refuses those without one."""
    key = dict(scope["headers"]).get(b"x-key", b"").decode()
    if not key:
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, "who are you?")
    return Caller(key)


async def test_who_may_not_ask_is_refused_before_the_body_is_read(echo: Echo) -> None:
    config = GatewayConfig(body_timeout_s=600.0)
    app = limited(echo, config, by_key)
    async with asyncio.timeout(60), running_http(app, config) as http:
        status, headers, body = await talk(http.port, post(b"", "content-length: 500"))
    assert (status, error_code(body), headers["connection"]) == (400, "invalid_argument", "close")
    assert echo.calls == []


async def test_what_is_counted_is_counted_by_caller(echo: Echo) -> None:
    config = GatewayConfig(max_connections_per_client=1, forwarded_allow_ips="127.0.0.1", max_held_bytes=1_000_000)
    app = limited(echo, config, by_key)
    async with running_http(app, config) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(get("/stream", "x-key: a", CLOSE))
        await reader.readexactly(100_000)
        assert (await talk(http.port, get("/", "x-key: a", CLOSE)))[0] == 503
        assert (await talk(http.port, get("/", "x-key: b", CLOSE)))[0] == 200
        writer.close()
        await echo.gone.wait()
        too_much = post(b"x" * 600_000, "content-length: 600000", "x-key: c", CLOSE)
        assert (await talk(http.port, too_much))[0] == 413


async def test_routes_know_who_asks() -> None:
    seen: list[Caller] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["caller"])
        await Echo()(scope, receive, send)

    config = GatewayConfig(forwarded_allow_ips="127.0.0.1")
    async with running_http(limited(app, config), config) as http:
        await talk(http.port, get("/", CLOSE))
        await talk(http.port, get("/", "x-forwarded-for: 1.2.3.4", CLOSE))
    assert seen == [Caller("127.0.0.1"), Caller("1.2.3.4")]


async def test_uploads_of_one_client_cannot_hold_all_memory() -> None:
    """Abandoned uploads count until their connection ends."""
    config = GatewayConfig(max_held_bytes=1_000_000, body_timeout_s=60.0, forwarded_allow_ips="127.0.0.1")
    app = limited(Echo(), config)
    part = b"x" * 300_000

    def upload(client: str, *lines: str) -> bytes:
        return post(part, "content-length: 400000", f"x-forwarded-for: {client}", *lines)

    async with running_http(app, config) as http:
        _, abandoned = await asyncio.open_connection("127.0.0.1", http.port)
        abandoned.write(upload("1.1.1.1"))
        await until(lambda: app._memory.held_bytes >= len(part))
        status, headers, body = await talk(http.port, upload("1.1.1.1"))
        assert (status, error_code(body)) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
        whole = upload("2.2.2.2", CLOSE) + b"x" * 100_000
        assert (await talk(http.port, whole))[0] == 200
        small = post(b"x" * 1000, "content-length: 1000", "x-forwarded-for: 1.1.1.1", CLOSE)
        assert (await talk(http.port, small))[0] == 200
        abandoned.close()
        await until(lambda: app._memory.held_bytes == 0)


async def test_all_connections_are_bounded() -> None:
    config = GatewayConfig(max_connections=1)
    async with running_http(limited(Echo(), config), config) as http:
        _, writer = await asyncio.open_connection("127.0.0.1", http.port)
        await until(lambda: len(http.server.server_state.connections) == 1)
        assert (await talk(http.port, b""))[0] == 503
        writer.close()


@pytest.mark.parametrize("limits", [{"max_connections": 3}, {"max_connections_per_client": 3}])
async def test_connections_that_are_only_kept_make_room_the_longest_first(echo: Echo, limits: dict[str, int]) -> None:
    config = GatewayConfig(**limits, forwarded_allow_ips="")
    async with running_http(limited(echo, config), config) as http:
        kept = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(3)]
        for reader, writer in [*kept, kept[0]]:  # the first one is used again, so the second is idle for longest
            writer.write(get("/"))
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await until(lambda: len(http.server.server_state.connections) == 3)
        busy_reader, busy = await asyncio.open_connection("127.0.0.1", http.port)
        busy.write(get("/stream"))
        await busy_reader.readexactly(1000)
        assert await kept[1][0].read() == b""
        for reader, writer in (kept[0], kept[2]):
            writer.write(get("/", CLOSE))
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for _, writer in (*kept, (None, busy)):
            writer.close()


async def test_a_client_that_reads_nothing_is_cut_off(http: Running, echo: Echo) -> None:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", http.port))
    await asyncio.get_running_loop().sock_sendall(sock, get("/stream"))
    async with asyncio.timeout(10):
        await echo.gone.wait()
    assert http.slow == [True]
    assert echo.streamed < 4 * 1024 * 1024
    sock.close()


async def test_a_client_that_reads_slowly_is_served(echo: Echo) -> None:
    """For longer than the limit, which the client would break only if it read nothing for that long."""
    config = replace(CONFIG, slow_client_timeout_s=2.0)
    async with running_http(limited(echo, config), config) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port, limit=65536)
        writer.write(get("/stream"))
        for _ in range(125):
            await reader.read(65536)
            await asyncio.sleep(0.02)
        assert http.slow == []
        assert not echo.gone.is_set()
        writer.close()
        await echo.gone.wait()


async def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await limited(Echo(), CONFIG)({"type": "websocket"}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_limits_hold_without_our_protocol() -> None:
    """Under another ASGI server only the middleware is present."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "path": "/", "headers": [(b"x", b"y")] * 11}
    await limited(Echo(), CONFIG)(scope, receive, send)
    assert sent[0]["status"] == 431
    assert json.loads(sent[1]["body"])["error"]["code"] == "headers_too_large"


PLAIN = ["a", "v1", "b.c", "...", "%41", "x%20y"]
ODD = ["..", ".", "", "%2e", "%2F", "\\", "x%00", "a%0d", "a b", "\u00e9"]


@given(st.lists(st.sampled_from(PLAIN), max_size=4), st.booleans())
def test_plain_paths_are_normal(segments: list[str], slash: bool) -> None:
    path = "/" + "/".join(segments) + ("/" if slash and segments else "")
    assert is_normal_path(path.encode(), unquote(path))


@given(st.lists(st.sampled_from(PLAIN), max_size=3), st.sampled_from(ODD), st.lists(st.sampled_from(PLAIN), min_size=1))
def test_one_odd_segment_is_enough(before: list[str], odd: str, after: list[str]) -> None:
    path = "/" + "/".join([*before, odd, *after])
    assert not is_normal_path(path.encode(), unquote(path))


UPLOADS = {"/upload": 2_000_000}


async def taking(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads a body to its end, and answers with its length."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    told = b"%d" % num_bytes
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told, "more_body": False})


@pytest.fixture
async def upload() -> AsyncIterator[Running]:
    app = limited(taking, CONFIG, uploads=UPLOADS)
    async with running_http(app, CONFIG) as running:
        yield running


async def uploaded(port: int, *pieces: bytes, length: int, path: str = "/upload") -> tuple[int, bytes]:
    """Send the pieces with pauses between them, each longer than the body timeout of an ordinary request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n".encode())
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(1.5 * CONFIG.body_timeout_s)
    status, _, body = parse(await reader.read())
    writer.close()
    return status, body


async def test_an_upload_has_longer_the_more_of_it_has_come(upload: Running) -> None:
    piece = bytes(5 * LEAST_BYTES_PER_S)
    assert await uploaded(upload.port, piece, piece, piece, length=3 * len(piece)) == (200, b"983040")
    status, body = await uploaded(upload.port, b"x", b"y", length=2)
    assert (status, error_code(body)) == (408, "request_timeout")


async def test_sec_20_an_upload_has_a_limit_of_its_own_and_other_paths_have_none(upload: Running) -> None:
    status, body = await uploaded(upload.port, b"x", length=2_000_001)
    assert (status, error_code(body)) == (413, "request_too_large")
    status, body = await uploaded(upload.port, b"x", length=1001, path="/upload/more")
    assert (status, error_code(body)) == (413, "request_too_large")
