"""The whole gateway on real sockets, in front of an engine core that dies, stalls, and comes back."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fake_engine_core import FakeEngineCore, running_engine, until
from tests.gateway.http_fakes import error_code, talk
from tests.gateway.keys.whole_app import running_app
from tests.gateway.model_dir import write_model_dir
from tests.gateway.store.redis_server import running_redis

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.health import HealthTimes
from pagoda_gateway.http.listening import bind, url_of
from pagoda_gateway.server import keep_text, load_text, serve, tell_who_may_ask

TIMES = HealthTimes(idle_s=1000.0, tick_s=0.02, canary_spacing_s=0.02)


class Gateway:
    """A running `serve`; `client` talks to it, `events` is what it reported."""

    def __init__(self, config: GatewayConfig) -> None:
        self.events: list[dict[str, object]] = []
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(
            serve(config, bind(config.host, 0), self.events.append, self.stop, health_times=TIMES)
        )
        self.client = httpx.AsyncClient(timeout=120)

    @property
    def names(self) -> list[object]:
        return [event["event"] for event in self.events]

    @property
    def url(self) -> str:
        return next(str(event["url"]) for event in self.events if "url" in event)

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    async def until_reported(self, name: str) -> None:
        await until(lambda: name in self.names or self.task.done())
        assert name in self.names
        self.client.base_url = self.url


Start = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeEngineCore]:
    async with running_engine(f"unix:{tmp_path}/e") as engine:
        yield engine


@pytest.fixture
async def start(tmp_path: Path, model: Path) -> Start:
    @asynccontextmanager
    async def started(**fields: Any) -> AsyncIterator[Gateway]:
        config = GatewayConfig(model=str(model), engine=f"unix:{tmp_path}/e", port=0, served_model_name="m", **fields)
        gateway = Gateway(config)
        try:
            await gateway.until_reported("listening")
            yield gateway
        finally:
            gateway.stop.set()
            await gateway.client.aclose()
            await gateway.task

    return started


def prompt(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hello", "max_tokens": 12, "seed": 1, "ignore_eos": True} | fields


def raw_post(content: dict[str, Any]) -> bytes:
    body = json.dumps(content)
    lines = ["POST /v1/completions HTTP/1.1", "host: h", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", body]).encode()


async def events_of(gateway: Gateway, begun: asyncio.Event | None = None, **fields: Any) -> list[Any]:
    """The stream's data lines, decoded; [DONE] is kept as a string."""
    lines = []
    async with gateway.client.stream("POST", "/v1/completions", json=prompt(stream=True, **fields)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                lines.append(line[6:])
                if begun is not None:
                    begun.set()
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list[Any], choice: int = 0) -> str:
    choices = [c for event in events if event != "[DONE]" for c in event.get("choices", ())]
    return "".join(c["text"] for c in choices if c["index"] == choice)


async def test_ready_when_the_engine_core_is(engine: FakeEngineCore, start: Start) -> None:
    async with start() as gateway:
        await gateway.until_reported("ready")
        assert gateway.names == ["listening", "ready"]
        for path in ("/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/v1/models"):
            assert (await gateway.client.get(path)).status_code == 200
        for path in ("/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/version", "/metrics"):
            head = await gateway.client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        answer = await gateway.client.post("/v1/completions", json=prompt())
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 12
        assert "server" not in answer.headers
        await engine.kill()
        await gateway.until_reported("unready")
        assert (await gateway.client.get("/health/ready")).status_code == 503
        assert (await gateway.client.get("/health/startup")).status_code == 200
    assert gateway.names == ["listening", "ready", "unready"]


async def test_without_an_engine_core_it_says_so(start: Start) -> None:
    async with start() as gateway:
        answer = await gateway.client.post("/v1/completions", json=prompt())
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert gateway.names == ["listening"]


async def test_a_stream_survives_the_engine_core(engine: FakeEngineCore, start: Start) -> None:
    async with start() as gateway:
        await gateway.until_reported("ready")
        undisturbed = await events_of(gateway, n=2)
        engine.steps = asyncio.Semaphore(5)
        sent = engine.num_sent
        reading = asyncio.create_task(events_of(gateway, n=2))
        await engine.wait_sent(sent + 10)
        await engine.kill()
        engine.steps = None
        await engine.start()
        events = await reading
        for choice in (0, 1):
            assert text_of(events, choice) == text_of(undisturbed, choice)
        assert events[-1] == "[DONE]"


async def test_a_stream_that_cannot_go_on_says_so(engine: FakeEngineCore, start: Start) -> None:
    async with start(resume_wait_s=0.2) as gateway:
        await gateway.until_reported("ready")
        undisturbed = await events_of(gateway)
        engine.steps = asyncio.Semaphore(5)
        sent = engine.num_sent
        begun = asyncio.Event()
        reading = asyncio.create_task(events_of(gateway, begun))
        await engine.wait_sent(sent + 5)
        await begun.wait()
        await engine.kill()
        events = await reading
        assert events[-1]["error"]["code"] == "stream_interrupted"
        assert text_of(undisturbed).startswith(text_of(events[:-1]))
        assert "[DONE]" not in events


@pytest.mark.parametrize(("stream", "num_tokens"), [(True, 3), (True, 0), (False, 0), (False, 3)])
async def test_a_client_that_leaves_frees_its_request(
    engine: FakeEngineCore, start: Start, stream: bool, num_tokens: int
) -> None:
    async with start() as gateway:
        await gateway.until_reported("ready")
        engine.steps = asyncio.Semaphore(num_tokens)
        engine.aborted.clear()
        sent = engine.num_sent
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_post(prompt(stream=stream)))
        await until(lambda: len(engine.running) == 1)
        await engine.wait_sent(sent + num_tokens)
        writer.close()
        await engine.aborted.wait()
        await until(lambda: not engine.running)
        assert (await gateway.client.get("/load")).json()["server_load"] == 0


async def test_a_client_that_reads_nothing_frees_its_request(engine: FakeEngineCore, start: Start) -> None:
    engine.set_load(max_model_len=1_000_000)
    async with start(slow_client_timeout_s=0.3) as gateway:
        await gateway.until_reported("ready")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", gateway.port))
            await loop.sock_sendall(sock, raw_post(prompt(stream=True, max_tokens=200_000, logprobs=5)))
            await engine.aborted.wait()
            await until(lambda: not engine.running)
            assert 'pagoda_slow_clients_total{model_name="m"} 1.0' in (await gateway.client.get("/metrics")).text


async def test_a_gateway_full_of_streams_is_alive_and_says_so(engine: FakeEngineCore, start: Start) -> None:
    async with start(max_connections=2, admin_api_key="key-of-the-admin") as gateway:
        await gateway.until_reported("ready")
        gateway.client.headers["x-api-key"] = "key-of-the-admin"
        engine.steps = asyncio.Semaphore(4)
        reading = [asyncio.create_task(events_of(gateway)) for _ in range(2)]
        await until(lambda: len(engine.running) == 2)
        async with httpx.AsyncClient(base_url=gateway.url, headers=gateway.client.headers) as other:
            for path in ("/health/live", "/health/ready", "/health/startup", "/health", "/ping"):
                assert (await other.get(path)).status_code == 200
            for path in ("/v1/models", "/metrics", "/health/other"):
                answer = await other.get(path)
                assert (answer.status_code, error_code(answer.content)) == (503, "overloaded")
        for _ in range(100):
            engine.steps.release()
        assert all(events[-1] == "[DONE]" for events in await asyncio.gather(*reading))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
async def test_what_a_client_calls_its_request_is_in_the_requests_line_of_the_log(
    engine: FakeEngineCore, start: Start, caplog: pytest.LogCaptureFixture, stream: bool, key: dict[str, str]
) -> None:
    caplog.set_level(logging.INFO)
    async with start() as gateway:
        await gateway.until_reported("ready")
        headers = key | {"x-request-id": "of-a-client"}
        answer = await gateway.client.post("/v1/completions", json=prompt(stream=stream), headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "of-a-client")
        await until(lambda: " request_id=of-a-client " in caplog.text)
        [line] = [record.getMessage() for record in caplog.records if "request_id=" in record.getMessage()]
        assert line.startswith("request id=")
        assert line.endswith(" end=length")
        answer = await gateway.client.post("/v1/completions", json=prompt())
        await until(lambda: f" request_id={answer.headers['x-request-id']} " in caplog.text)


async def test_drain_lets_open_requests_finish(engine: FakeEngineCore, start: Start) -> None:
    async with start() as gateway:
        await gateway.until_reported("ready")
        undisturbed = await events_of(gateway)
        engine.steps = asyncio.Semaphore(4)
        sent = engine.num_sent
        reading = asyncio.create_task(events_of(gateway))
        await engine.wait_sent(sent + 4)
        gateway.stop.set()
        await gateway.until_reported("unready")
        with pytest.raises((httpx.ConnectError, httpx.RemoteProtocolError)):
            while True:
                async with httpx.AsyncClient(base_url=gateway.client.base_url) as other:
                    assert (await other.get("/health/ready")).status_code == 503
        assert not gateway.task.done()
        for _ in range(12):
            engine.steps.release()
        events = await reading
        assert text_of(events) == text_of(undisturbed)
        assert events[-1] == "[DONE]"
        await gateway.task


async def test_the_lame_duck_goes_on_accepting(engine: FakeEngineCore, start: Start) -> None:
    async with start(lame_duck_s=1.0) as gateway:
        await gateway.until_reported("ready")
        gateway.stop.set()
        await gateway.until_reported("unready")
        status, headers, body = await talk(gateway.port, b"GET /health/ready HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (status, headers["connection"]) == (503, "close")
        assert json.loads(body)["problems"] == ["draining"]
        assert (await gateway.client.post("/v1/completions", json=prompt())).status_code == 200


async def test_drain_is_bounded(engine: FakeEngineCore, start: Start) -> None:
    async with start(drain_timeout_s=0.3) as gateway:
        await gateway.until_reported("ready")
        engine.steps = asyncio.Semaphore(2)
        sent = engine.num_sent
        reading = asyncio.create_task(events_of(gateway))
        await engine.wait_sent(sent + 2)
        gateway.stop.set()
        events = await reading
        assert events[-1]["error"]["code"] == "stream_interrupted"
        await gateway.task


async def test_what_cannot_start_says_why(tmp_path: Path, model: Path) -> None:
    def config(**fields: Any) -> GatewayConfig:
        return GatewayConfig(**({"model": str(model), "engine": f"unix:{tmp_path}/e", "port": 0} | fields))

    async def run(config: GatewayConfig) -> None:
        await serve(config, bind("127.0.0.1", 0), lambda event: None, asyncio.Event())

    with pytest.raises(ValueError, match="loopback"):
        await run(config(engine="10.1.2.3:50051"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        await run(config(model=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="chat_template"):
        await run(config(chat_template=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("host", "config", "events", "warned"),
    [
        ("127.0.0.1", {"admin_api_key": ""}, [], False),
        ("0.0.0.0", {"admin_api_key": ""}, [], True),
        ("0.0.0.0", {"admin_api_key": "", "auth": "none"}, [], True),
        ("0.0.0.0", {}, [{"event": "locked"}], False),
    ],
)
async def test_a_public_address_without_keys_is_warned_about(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    host: str,
    config: dict[str, str],
    events: list[dict[str, object]],
    warned: bool,
) -> None:
    """The addresses are only bound; nothing listens on them."""
    told: list[dict[str, object]] = []
    async with running_app(tmp_path, **config) as app:
        with caplog.at_level(logging.WARNING), bind(host, 0) as sock:
            assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
            await tell_who_may_ask(app.gateway.context, sock, told.append)
    assert told == events
    assert ("whoever reaches it may use it" in caplog.text) == warned


def test_the_served_text_side_can_have_its_own_template(tmp_path: Path, model: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}!")
    text = load_text(GatewayConfig(model=str(model), chat_template=str(template)))
    assert text.render_chat([{"role": "user", "content": "hi"}]) == "hi!"


async def test_a_text_side_that_was_kept_is_served_and_not_loaded_again(
    engine: FakeEngineCore, start: Start, tmp_path: Path, model: Path
) -> None:
    keep_text(GatewayConfig(model=str(model), engine=f"unix:{tmp_path}/e", port=0, served_model_name="m"))
    (model / "tokenizer.json").rename(model / "elsewhere")
    async with start() as gateway:
        await gateway.until_reported("ready")
        answer = await gateway.client.post("/v1/completions", json=prompt())
        assert answer.json()["usage"]["completion_tokens"] == 12
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):  # the first start took the kept text
        async with start():
            pass


async def test_a_store_that_hangs_or_is_gone_costs_a_chat_nothing(engine: FakeEngineCore, start: Start) -> None:
    async with running_redis() as server, start(store=server.address) as gateway:
        await gateway.until_reported("ready")
        upload = {"files": {"file": ("l", b"{}\n")}, "data": {"purpose": "batch"}}
        assert (await gateway.client.post("/v1/files", **upload)).status_code == 200
        server.send(signal.SIGSTOP)
        hanging = asyncio.create_task(gateway.client.get("/v1/files"))
        answer = await gateway.client.post("/v1/completions", json=prompt())
        assert answer.status_code == 200
        assert (await hanging).status_code == 503
        refused = await gateway.client.post("/v1/files", **upload)
        assert (refused.status_code, error_code(refused.content)) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await gateway.client.get("/health/ready")).status_code == 200
        server.send(signal.SIGCONT)
        while (await gateway.client.get("/v1/files")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        server.send(signal.SIGSTOP)  # a gateway must still be able to shut down


async def test_without_its_store_a_gateway_starts_and_serves(engine: FakeEngineCore, start: Start) -> None:
    async with start(store="redis://127.0.0.1:1", auth="none") as gateway:
        await gateway.until_reported("ready")
        assert (await gateway.client.get("/v1/batches")).status_code == 503
        assert (await gateway.client.post("/v1/completions", json=prompt())).status_code == 200
        metrics = (await gateway.client.get("/metrics")).text
        assert 'pagoda_store_up{model_name="m"} 0.0' in metrics


@pytest.mark.parametrize("auth", ["auto", "keys"])
async def test_who_cannot_know_whether_there_are_keys_is_unready_until_the_store_has_answered_once(
    engine: FakeEngineCore, start: Start, caplog: pytest.LogCaptureFixture, auth: str
) -> None:
    """Meanwhile it receives only health checks, as behind a load balancer that sees it unready."""
    async with running_redis() as server:
        await server.kill()
        async with start(store=server.address, auth=auth) as gateway:
            await until(lambda: "no request is served until the store answers" in caplog.text)
            problems: list[str] = []
            while problems != ["the store has not answered yet, so API keys cannot be looked up"]:  # and no other
                unready = await gateway.client.get(f"{gateway.url}/health/ready")
                assert unready.status_code == 503
                problems = unready.json()["problems"]
            gateway.client.base_url = gateway.url
            shown = {"x-api-key": f"sk-pagoda-{'0' * 16}-{'x' * 43}"}
            assert (await gateway.client.get("/metrics", headers=shown)).status_code == 503
            assert "ready" not in gateway.names
            await server.start()
            await gateway.until_reported("ready")
            assert gateway.names == ["listening", *(["locked"] if auth == "keys" else []), "ready"]
            await server.kill()
            await gateway.client.get("/v1/files")
            assert (await gateway.client.get("/health/ready")).status_code == 200
    assert caplog.text.count("no request is served until the store answers") == 1


async def test_who_does_not_know_whether_there_are_keys_serves_those_of_its_options_and_nobody_else(
    engine: FakeEngineCore, start: Start
) -> None:
    async with start(store="redis://127.0.0.1:1") as gateway:
        refused = await gateway.client.post("/v1/completions", json=prompt())
        assert (refused.status_code, error_code(refused.content)) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
    async with start(store="redis://127.0.0.1:1", api_key="key-of-an-option") as gateway:
        await gateway.until_reported("ready")
        shown = {"authorization": "Bearer key-of-an-option"}
        assert (await gateway.client.post("/v1/completions", json=prompt(), headers=shown)).status_code == 200
