"""The assembled app: every response has an id and is counted under a known name; every error has OpenAI's format."""

from __future__ import annotations

import logging
import random
import re
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fakes_engine import scratch, text_of
from tests.gateway.http_fakes import error_code
from tests.gateway.model_dir import write_model_dir

from pagoda_gateway.api.answer_schemas import RequestSpent, StackAnswer
from pagoda_gateway.app import Served, create_app
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.batches.batches import Batches
from pagoda_gateway.clients import OPEN_PATHS
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.recent import EndedRequest
from pagoda_gateway.engine.session import EngineAddress
from pagoda_gateway.health import Health
from pagoda_gateway.keys.gate import OptionKeys
from pagoda_gateway.keys.grants import NO_LIMITS
from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.page import files
from pagoda_gateway.tickets.tickets import Tickets


class Gateway:
    """An app without an engine core behind it."""

    def __init__(self, root: Path, **options: Any) -> None:
        model = write_model_dir(root / "model")
        config = GatewayConfig(model=str(model), engine=f"unix:{root}/none", **options)
        self.metrics = GatewayMetrics("m")
        self.engine = SessionClient([EngineAddress(config.engine)], self.metrics)
        self.health = Health(self.engine, self.metrics)
        ctx = GatewayContext.new(config, text_of(model), self.engine, names=["m"], created=1, store=scratch())
        background, kept, tickets = BackgroundResponses(ctx), Batches(ctx.store), Tickets(ctx)
        app: Any = create_app(Served(ctx, self.health, self.metrics, background, kept, tickets))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(tmp_path)
    async with gateway.client:
        yield gateway


KEYS = ("one-key-of-two", "other-key-of-two")


async def test_sec_22_where_there_are_keys_only_health_and_the_pages_files_are_open(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, api_key=",".join(KEYS))
    async with gateway.client:
        paths = set(gateway.metrics._routes) | {"/nothing/here", "/openapi.json", "/page/nothing.js"} | files.PATHS
        assert len(paths) > 12
        assert set(files.PATHS) < OPEN_PATHS
        for path in paths:
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                answer = await gateway.client.request(method, path.replace("{model:path}", "m"), content=b"{}")
                assert (answer.status_code == 401) == (path not in OPEN_PATHS), (method, path)
        answer = await gateway.client.post("/v1/chat/completions", json={})
        assert error_code(answer.content) == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        answer = await gateway.client.post("/v1/messages", json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        for almost in (
            "http://gateway//health",
            "/health/",
            "/health/live/../../v1/models",
            "/health/../v1/models",
            "/page/../v1/models",
        ):
            assert (await gateway.client.get(almost)).status_code in (400, 401)


@pytest.mark.parametrize("key", KEYS)
async def test_any_of_the_keys_opens_in_either_header(tmp_path: Path, key: str) -> None:
    gateway = Gateway(tmp_path, api_key=",".join(KEYS))
    async with gateway.client:
        for headers in ({"authorization": f"Bearer {key}"}, {"Authorization": f"bearer  {key}"}, {"x-api-key": key}):
            assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200
        both = {"authorization": f"Bearer {key}", "x-api-key": key}
        assert (await gateway.client.get("/v1/models", headers=both)).status_code == 200


async def test_what_is_no_key_opens_nothing(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, api_key=",".join(KEYS))
    async with gateway.client:
        wrong = [",".join(KEYS), KEYS[0][:-1], KEYS[0] + "x", KEYS[0].upper(), "", "none"]
        shown: list[dict[str, Any]] = [{"authorization": f"Bearer {key}"} for key in wrong] + [
            {"x-api-key": key} for key in wrong
        ]
        shown += [{"authorization": KEYS[0]}, {"authorization": f"Basic {KEYS[0]}"}]
        shown += [{"authorization": f"Bearer {KEYS[0]}", "x-api-key": KEYS[1]}, {"x-api-key": "\u00e9".encode()}]
        for headers in shown:
            answer = await gateway.client.get("/v1/models", headers=headers)
            assert answer.status_code == 401, headers
            assert not any(key in answer.text for key in KEYS)


async def test_request_ids(gateway: Gateway) -> None:
    for sent in ("abc-1.2_3", "x" * 128):
        answer = await gateway.client.get("/version", headers={"x-request-id": sent})
        assert answer.headers["x-request-id"] == sent
    own = set()
    for sent in ('a"b', "x" * 129, "a b", "ä".encode(), ""):
        answer = await gateway.client.get("/version", headers={"x-request-id": sent})
        own.add(answer.headers["x-request-id"])
    assert len(own) == 5
    assert all(re.fullmatch(r"req-[0-9a-f]{32}", text) for text in own)


async def test_refusals_have_ids_too(gateway: Gateway) -> None:
    answer = await gateway.client.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert error_code(answer.content) == "unsupported_media_type"
    assert answer.headers["x-request-id"]
    assert answer.headers["x-should-retry"] == "false"


async def test_unknown_paths_and_methods(gateway: Gateway) -> None:
    answer = await gateway.client.get("/v1/nothing")
    assert (answer.status_code, error_code(answer.content)) == (404, "not_found")
    answer = await gateway.client.delete("/version")
    assert (answer.status_code, error_code(answer.content)) == (405, "method_not_allowed")


async def test_a_slash_too_many_is_not_redirected(gateway: Gateway) -> None:
    for path in ("/v1/chat/completions/", "/v1/models/m/", "/health/"):
        answer = await gateway.client.post(path, headers={"host": "evil.example"}, json={})
        assert answer.status_code in (404, 405)
        assert "location" not in answer.headers
        assert "evil" not in answer.text


async def test_sec_29_browsers_of_other_sites_get_nothing(gateway: Gateway) -> None:
    """No route answers a preflight, allows an origin or sets a cookie; bodies are read as application/json only."""
    ask = {"origin": "http://evil.example", "access-control-request-method": "POST", "host": "evil.example"}
    for path in ("/v1/chat/completions", "/v1/models", "/docs", "/version", "/metrics"):
        for method in ("OPTIONS", "GET", "POST"):
            answer = await gateway.client.request(method, path, headers=ask)
            assert not [name for name in answer.headers if name.startswith("access-control-")]
            assert "set-cookie" not in answer.headers
            assert method != "OPTIONS" or answer.status_code in (404, 405)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = await gateway.client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415


ORIGIN = "https://chat.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize("allowed", [ORIGIN, f"http://localhost:3000,{ORIGIN}", "*"])
async def test_pages_of_allowed_origins_may_ask_and_read_refusals(tmp_path: Path, allowed: str) -> None:
    gateway = Gateway(tmp_path, allowed_origins=allowed, api_key=KEYS[0])
    async with gateway.client:
        answer = await gateway.client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        refused = await gateway.client.post("/v1/chat/completions", headers={"origin": ORIGIN}, json={})
        assert refused.status_code == 401
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        for one in (answer, refused):
            assert one.headers["access-control-allow-origin"] == ("*" if allowed == "*" else ORIGIN)


async def test_pages_of_other_origins_get_nothing_of_it(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, allowed_origins=ORIGIN)
    async with gateway.client:
        for origin in ("https://evil.example", "https://chat.example.evil.example", "http://chat.example", "null"):
            for method in ("OPTIONS", "GET"):
                headers = PREFLIGHT | {"origin": origin}
                answer = await gateway.client.request(method, "/v1/models", headers=headers)
                assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("forged", ['x\n{"level": "error"}', "x\r\nset-cookie: a=b", 'a"b', "x" * 300])
async def test_sec_31_what_clients_write_forges_no_line(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, forged: str
) -> None:
    answer = await gateway.client.post("/v1/completions", json={"prompt": "x", "model": forged, "user": "u"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 256
    assert forged not in caplog.text


async def test_sec_31_a_refused_request_is_found_in_the_log_by_the_id_that_its_client_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway(tmp_path, api_key=",".join(KEYS))
    caplog.set_level(logging.INFO, "pagoda_gateway")
    key = {"x-api-key": KEYS[0]}
    asked = [
        ("GET", "/nothing/my-secret", key, 404, "not_found", "other"),
        ("GET", "/v1/models", {}, 401, "invalid_api_key", "/v1/models"),
        ("PUT", "/v1/models", key, 405, "method_not_allowed", "/v1/models"),
        ("POST", "/v1/completions", key, 404, "model_not_found", "/v1/completions"),
        ("GET", "/v1/requests/my-secret", key, 404, "not_found", "/v1/requests/{request_id}"),
    ]
    async with gateway.client:
        for method, path, headers, status, code, route in asked:
            caplog.clear()
            body = {"prompt": "my-secret", "model": "my-secret"}
            answer = await gateway.client.request(method, path, json=body, headers=headers)
            assert answer.status_code == status
            name = answer.headers["x-request-id"]
            line = f"failed request_id={name} status={status} error={code} method={method} route={route}"
            assert [record.getMessage() for record in caplog.records if "request_id" in record.getMessage()] == [line]
            assert "my-secret" not in caplog.text
        caplog.clear()
        for own, shown in (("of-mine", True), ("a%0ab", False), ("x" * 129, False), ("a b", False)):
            await gateway.client.get("/nothing", headers=key | {"x-request-id": own})
            assert (own in caplog.text) == shown
        caplog.clear()
        assert (await gateway.client.get("/v1/models", headers=key)).status_code == 200
        assert (await gateway.client.get("/health/ready")).status_code == 503
        assert "failed" not in caplog.text


async def test_sec_20_compressed_and_multipart_bodies_are_refused(gateway: Gateway) -> None:
    for encoding in ("gzip", "br", "zstd", "gzip, identity", "deflate"):
        answer = await gateway.client.post("/tokenize", content=b"{}", headers={"content-encoding": encoding})
        assert (answer.status_code, error_code(answer.content)) == (415, "unsupported_media_type")


async def test_health_without_an_engine_core(gateway: Gateway) -> None:
    live = await gateway.client.get("/health/live")
    assert (live.status_code, live.json()["dead"]) == (503, ["engine session", "engine clock", "health"])
    ready = await gateway.client.get("/health/ready")
    assert ready.status_code == 503
    assert "engine core is not connected" in ready.json()["problems"]
    startup = await gateway.client.get("/health/startup")
    assert (startup.status_code, startup.json()["phase"]) == (503, "connecting")
    for path in ("/health", "/ping"):
        answer = await gateway.client.get(path)
        assert (answer.status_code, answer.content) == (503, b"")


async def test_reports(gateway: Gateway) -> None:
    assert set((await gateway.client.get("/version")).json()) == {"version"}
    load = (await gateway.client.get("/load")).json()
    assert load["server_load"] == 0
    assert load["engine"]["num_workers"] == 0
    answer = await gateway.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'pagoda_engine_connected{model_name="m"} 0.0' in answer.text


async def test_docs_load_nothing_from_elsewhere(gateway: Gateway) -> None:
    api = (await gateway.client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health/ready"} <= set(api["paths"])
    page = await gateway.client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    sources = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert sources
    for source in sources:
        assert source.startswith("/")
        assert (await gateway.client.get(source)).status_code == 200


async def test_the_page_loads_nothing_from_elsewhere_and_can_be_left_out(gateway: Gateway, tmp_path: Path) -> None:
    page = await gateway.client.get("/")
    sources = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(sources) >= 5
    for source in sources:
        assert (await gateway.client.get("/" + source)).status_code == 200
    without = Gateway(tmp_path / "without", page=False)
    async with without.client:
        assert (await without.client.get("/")).status_code == 404
        assert (await without.client.get("/page/main.js")).status_code == 404
        assert (await without.client.get("/stack")).status_code == 200


def ended(name: str) -> EndedRequest:
    return EndedRequest(
        id=name, model="m", ended_at=1.0, end="stop", prompt_tokens=1, cached_prompt_tokens=0, output_tokens=2,
        ttft_s=0.5, tpot_s=None, total_s=1.5, attempts=1, waits_s={"decode": 1.0},
    )  # fmt: skip


async def test_the_stack_is_told_as_described_also_without_an_engine_core(gateway: Gateway) -> None:
    gateway.engine.recent.add("", ended("mine"))
    answer = await gateway.client.get("/stack")
    stack = StackAnswer.model_validate(answer.json())
    assert answer.headers["cache-control"] == "no-store"
    assert stack.report is None
    assert stack.problems[0] == "engine core is not connected"
    assert [request.id for request in stack.requests] == ["mine"]


async def test_sec_08_last_requests_are_told_to_the_key_that_made_them(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, api_key=",".join(KEYS))
    async with gateway.client:
        tenants = [holder.tenant for _, holder in OptionKeys(client=",".join(KEYS)).holders(NO_LIMITS)]
        for tenant in tenants:
            gateway.engine.recent.add(tenant, ended(f"of {tenant}"))
        gateway.engine.recent.add("", ended("of nobody"))
        for key, tenant in zip(KEYS, tenants, strict=True):
            answer = await gateway.client.get("/stack", headers={"x-api-key": key})
            assert [request["id"] for request in answer.json()["requests"]] == [f"of {tenant}"]
        assert (await gateway.client.get("/stack")).status_code == 401


async def test_sec_08_where_time_went_is_told_to_the_key_that_spent_it(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, api_key=",".join(KEYS))
    async with gateway.client:
        tenant, _ = (holder.tenant for _, holder in OptionKeys(client=",".join(KEYS)).holders(NO_LIMITS))
        gateway.engine.recent.add(tenant, ended("mine"))
        mine, others = [
            await gateway.client.get("/v1/requests/chatcmpl-mine", headers={"x-api-key": key}) for key in KEYS
        ]
        told = RequestSpent.model_validate(mine.json())
        assert (told.id, told.waits_s) == ("mine", {"decode": 1.0, "outside_engine_core": 0.5})
        assert (others.status_code, others.json()["error"]["code"]) == (404, "not_found")


async def test_series_do_not_grow_with_what_clients_send(gateway: Gateway) -> None:
    async def ask(method: str, path: str) -> None:
        await gateway.client.request(method, path)

    async def count() -> int:
        lines = (await gateway.client.get("/metrics")).text.splitlines()
        return sum(not line.startswith("#") and "_created" not in line for line in lines)

    rng = random.Random(1)
    for method in ("GET", "POST", "BREW"):
        for path in ("/x", "//x", "/v1/models", "/v1/models/some"):
            await ask(method, path)
    await count()
    before = await count()
    for _ in range(300):
        name = "".join(rng.choices(string.ascii_letters, k=8))
        await ask("".join(rng.choices(string.ascii_uppercase, k=5)), f"/{name}")
        await ask("GET", f"/v1/models/{name}?{name}={name}")
    assert await count() == before
    text = (await gateway.client.get("/metrics")).text
    assert 'route="/v1/models"' in text
    assert 'pagoda_http_requests_total{method="other",route="other",status="4xx"}' in text


async def test_draining_closes_connections(gateway: Gateway) -> None:
    assert "connection" not in (await gateway.client.get("/version")).headers
    gateway.health.drain()
    assert (await gateway.client.get("/version")).headers["connection"] == "close"
