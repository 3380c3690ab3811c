"""Malicious requests to a running stack."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import socket
import string
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from tests.e2e.stack import Stack, running_stack

from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.engine.v1 import engine_pb2_grpc

pytestmark = pytest.mark.e2e

PROMPT = "xyzzy-the-user-wrote-this"
SECRET = "sk-plugh-0123456789"
# File paths, memory addresses, stack traces, sockets.
INNER = re.compile(r"/(usr|home|root|tmp|opt|work|run)/|\b0x[0-9a-f]{6,}|Traceback|File \"|\.py\b|\.sock|127\.0\.0\.1")
HEADER_TIMEOUT_S = 2.0
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--served-model-name", "demo", "--header-timeout-s", str(HEADER_TIMEOUT_S))
    with running_stack(tmp_path_factory.mktemp("security"), *options) as running:
        yield running


COMPLETION = {"model": "demo", "prompt": PROMPT}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
MESSAGE = CHAT | {"max_tokens": 4}
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", COMPLETION | {"temperature": -1}),
    ("/v1/completions", COMPLETION | {"n": 10**9}),
    ("/v1/completions", COMPLETION | {"max_tokens": 10**9}),
    ("/v1/completions", COMPLETION | {"model": "../../etc/passwd"}),
    ("/v1/completions", COMPLETION | {"logit_bias": {"99999999": 1}}),
    ("/v1/completions", COMPLETION | {"stop": [PROMPT] * 100}),
    ("/v1/completions", COMPLETION | {"no_such_field": PROMPT}),
    ("/v1/completions", {"model": "demo", "prompt": [2**31 - 1]}),
    ("/v1/completions", {"model": "demo", "prompt": PROMPT * 2000}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "wizard", "content": PROMPT}]}),
    ("/v1/chat/completions", CHAT | {"messages": []}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": {"text": PROMPT}}]}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema"}}),
    ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image", "source": PROMPT}]}]}),
    ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": [{"type": "text", "text": [PROMPT]}]}]}),
    ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": PROMPT * 2000}]}),
    ("/v1/messages", MESSAGE | {"system": {"text": PROMPT}}),
    ("/v1/messages", f'{{"system": "{PROMPT}", '),
    ("/v1/messages/count_tokens", MESSAGE),
    ("/tokenize", {"prompt": {"text": PROMPT}}),
    ("/v1/nothing", CHAT),
    ("/v1/completions", f'{{"prompt": "{PROMPT}", '),
    ("/v1/completions", f'["{PROMPT}"]'),
    ("/v1/completions", b"\xff\xfe" + PROMPT.encode()),
]


@pytest.mark.parametrize(("path", "body"), BAD, ids=range(len(BAD)))
def test_sec_21_an_error_tells_nothing_of_our_insides_nor_of_the_prompt(stack: Stack, path: str, body: Any) -> None:
    headers = {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Content-Type": "application/json"}
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    answer = httpx.post(stack.url + path, content=content, headers=headers, timeout=PATIENCE_S)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type"} | (set() if path.startswith("/v1/messages") else {"param", "code"})
    assert not INNER.search(answer.text), answer.text
    assert PROMPT not in answer.text
    assert SECRET not in answer.text + stack.log.read_text()


def test_sec_21_the_log_holds_no_prompt(stack: Stack) -> None:
    httpx.post(
        f"{stack.url}/v1/completions", json=COMPLETION | {"max_tokens": 4}, timeout=PATIENCE_S
    ).raise_for_status()
    assert PROMPT not in stack.log.read_text()


def connect(stack: Stack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.port), timeout=PATIENCE_S)


def answer_to(stack: Stack, data: bytes) -> bytes:
    """Everything received until the server closes; it may do so before it has read all."""
    received = b""
    with connect(stack) as connection:
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                received += part
        except (BrokenPipeError, ConnectionResetError):
            pass
    return received


REQUEST = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "head",
    [
        REQUEST + b"X-Big: " + b"a" * 2**20 + b"\r\n\r\n",
        REQUEST + b"".join(b"X-%d: 1\r\n" % number for number in range(10_000)) + b"\r\n",
        b"GET /" + b"a" * 2**16 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["a header of 1 MiB", "10,000 headers", "a line of 64 KiB"],
)
def test_sec_24_a_head_beyond_all_bounds_is_refused(stack: Stack, head: bytes) -> None:
    answer = answer_to(stack, head)
    assert answer == b"" or re.match(rb"HTTP/1.1 4(00|14|31) ", answer), answer[:200]
    assert httpx.get(f"{stack.url}/health/live", timeout=PATIENCE_S).status_code == 200


def test_sec_24_a_head_that_drips_is_ended_and_disturbs_nobody(stack: Stack) -> None:
    dripping = [connect(stack) for _ in range(100)]
    try:
        for connection in dripping:
            connection.sendall(REQUEST)
        assert httpx.get(f"{stack.url}/health/live", timeout=PATIENCE_S).status_code == 200
        for connection in dripping:  # the server closes each, with or without an answer
            while connection.recv(65536):
                pass
    finally:
        for connection in dripping:
            connection.close()


def test_sec_24_a_range_asks_in_vain(stack: Stack) -> None:
    ranges = "bytes=" + ",".join(f"{number}-" for number in range(1000))
    answer = httpx.get(f"{stack.url}/version", headers={"Range": ranges}, timeout=PATIENCE_S)
    assert answer.status_code == 200


def series(stack: Stack) -> set[str]:
    lines = httpx.get(f"{stack.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def test_sec_25_strangers_cannot_add_series(stack: Stack) -> None:
    rng = random.Random(25)

    def word() -> str:
        return "".join(rng.choices(string.ascii_uppercase, k=8))

    def ask(client: httpx.Client) -> None:
        client.request(word(), f"/{word()}")
        client.get(f"/v1/{word()}?{word()}={word()}")
        client.post("/v1/completions", json={"model": word(), "prompt": word(), "user": word()})
        client.post("/v1/chat/completions", json={"model": word(), word(): word()}, headers={"X-Request-Id": word()})

    series(stack)  # the metrics count requests for them, too
    with httpx.Client(base_url=stack.url, timeout=PATIENCE_S) as client:
        for _ in range(5):
            ask(client)
        before = series(stack)
        for _ in range(100):
            ask(client)
    assert series(stack) == before
    assert not any(re.search(r'="/?[A-Z]{8}"', one) for one in before)


@pytest.fixture
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    [address] = stack.engine_sockets()
    with grpc.insecure_channel(f"unix:{address}") as channel:
        yield channel


def status_of(call: Any) -> grpc.StatusCode:
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def raw_call(channel: grpc.Channel, method: str, payload: bytes) -> grpc.StatusCode:
    return status_of(channel.unary_stream(method)(payload, timeout=PATIENCE_S))


def test_sec_32_reflection_is_off_and_unknown_methods_are(channel: grpc.Channel) -> None:
    for method in (
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/pagoda.engine.v1.Engine/NoSuchMethod",
    ):
        assert raw_call(channel, method, b"") is grpc.StatusCode.UNIMPLEMENTED


def corpus() -> Iterator[bytes]:
    rng = random.Random(32)
    for _ in range(60):
        yield rng.randbytes(rng.randrange(1, 200))
    yield b"\xff" * 1000
    yield b"\x0a\xff\xff\xff\xff\x0f"  # a length beyond the end
    yield b"\x0b" * 50_000  # nested groups


def test_sec_32_bytes_that_are_no_message_cost_their_own_call_only(stack: Stack, channel: grpc.Channel) -> None:
    allowed = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNKNOWN,
    }
    for payload in corpus():
        assert raw_call(channel, "/pagoda.engine.v1.Engine/Generate", payload) in allowed, payload[:40]
    assert stack.ready()


def test_sec_32_a_message_beyond_the_limit_is_refused(channel: grpc.Channel) -> None:
    request = pb.GenerateRequest(record=pb.RequestRecord(request_id="x" * (65 * 2**20)))
    assert status_of(engine_pb2_grpc.EngineStub(channel).Generate(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_without_descriptors_it_serves_who_is_there_and_then_everybody(stack: Stack) -> None:
    (gateway,) = stack.children("gateway")
    limits = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    body = COMPLETION | {"max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.Client(base_url=stack.url, timeout=PATIENCE_S) as client, contextlib.ExitStack() as held:
        undisturbed = client.post("/v1/completions", json=body).text
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            begun = [next(lines) for _ in range(3)]
            most = gateway.num_fds() + 3
            resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
            try:
                for _ in range(40):
                    held.enter_context(connect(stack))
                while gateway.num_fds() < most:
                    time.sleep(0.01)
                told = [*begun, *lines]
            finally:
                resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, limits)
    assert texts_of(told) == texts_of(undisturbed.splitlines())
    assert httpx.get(f"{stack.url}/health/live", timeout=PATIENCE_S).status_code == 200
    assert stack.children("gateway") == [gateway]


def texts_of(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)
