"""Batches over HTTP: created, answered as live requests would be, cancelled, and invisible to other tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fake_engine_core import until
from tests.gateway.fakes_engine import MODEL, Batch, Gateway, failing, make_gateway, play
from tests.gateway.http_fakes import error_code
from tests.gateway.test_adapters import write

from pagoda_gateway.batches.batch import ENDED
from pagoda_gateway.batches.schemas import BatchList, BatchObject
from pagoda_gateway.clients import identify_by
from pagoda_gateway.generation.job import Job
from pagoda_gateway.http.limits import LimitsMiddleware
from pagoda_gateway.routes.batch_service import BatchService, batch_runner, behind_all
from pagoda_gateway.store.interface import unavailable
from pagoda_proto.adapters.files import WEIGHTS, identify
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import in_background
from pagoda_proto.records import RequestRecord

KEYS = ("key-of-tenant-one", "key-of-tenant-two")
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


class Served:
    """Clients of two tenants of one gateway, whose engine answers everything with three tokens."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.gateway: Gateway = make_gateway(root, play([5, 6, 7]), api_key=",".join(KEYS), **config)
        context = self.gateway.context
        identify, uploads = identify_by(context.config.forwarded_allow_ips, context.gate), {"/v1/files": 100_000}
        app = LimitsMiddleware(self.gateway.asgi, context.config, context.memory, identify, context.quotas, uploads)
        self.store: Any = context.store
        self.one, self.two = (
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app),
                base_url="http://gateway/v1",
                headers={"authorization": f"Bearer {key}"},
            )
            for key in KEYS
        )

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        runner = batch_runner(self.gateway.context, self.gateway.batches)
        runner.start()
        yield
        await runner.aclose()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    async with served.one, served.two:
        yield served
    await served.store.aclose()
    served.gateway.context.pool.close()


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": ASK | body}) + "\n"


async def uploaded(client: httpx.AsyncClient, *lines: str) -> str:
    answer = await client.post("/files", files={"file": ("l", "".join(lines).encode())}, data={"purpose": "batch"})
    return str(answer.json()["id"])


async def asked(client: httpx.AsyncClient, *lines: str, endpoint: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {"input_file_id": await uploaded(client, *lines), "endpoint": endpoint, "completion_window": "24h"}
    answer = await client.post("/batches", json=body | fields)
    assert answer.status_code == 200, answer.text
    return BatchObject.model_validate(answer.json()).model_dump()


async def ended(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    while (batch := (await client.get(f"/batches/{batch_id}")).json())["status"] not in ENDED:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return BatchObject.model_validate(batch).model_dump()


async def rows(client: httpx.AsyncClient, file_id: str) -> dict[str, Any]:
    content = (await client.get(f"/files/{file_id}/content")).text
    found = {row["custom_id"]: row for row in map(json.loads, content.splitlines())}
    assert len(found) == content.count("\n")
    return found


async def test_lines_are_answered_as_requests_are(served: Served) -> None:
    batch = await asked(served.one, line("a"), line("b", prompt="other"), metadata={"for": "me"})
    assert (batch["status"], batch["metadata"], batch["output_file_id"]) == ("validating", {"for": "me"}, None)
    async with served.working():
        done = await ended(served.one, batch["id"])
    assert (done["status"], done["model"]) == ("completed", MODEL)
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    found = await rows(served.one, done["output_file_id"])
    live = (await served.one.post("/completions", json=ASK)).json()
    for custom_id in ("a", "b"):
        response = found[custom_id]["response"]
        assert (response["status_code"], found[custom_id]["error"]) == (200, None)
        assert response["body"]["choices"] == live["choices"]
        assert set(response["body"]) == set(live)
    records = [generation.record for generation in served.gateway.engine.generations]
    assert [record.priority for record in records] == [in_background(0), in_background(0), 0]
    assert len({record.cache_salt for record in records}) == 1
    kept = (await served.one.get(f"/files/{done['output_file_id']}")).json()
    assert kept["purpose"] == "batch_output"


async def test_chats_are_answered_too_and_what_is_wrong_is_told_as_to_a_request(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    good = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": messages, "max_tokens": 3}}
    bad: dict[str, Any] = good | {"custom_id": "b", "body": {"messages": messages, "colour": "red"}}
    stream = good | {"custom_id": "c", "body": good["body"] | {"stream": True}}  # type: ignore[operator]
    lines = [json.dumps(each) + "\n" for each in (good, bad, stream)]
    batch = await asked(
        served.one, *lines, endpoint=CHAT, output_expires_after={"anchor": "created_at", "seconds": 3600}
    )
    async with served.working():
        done = await ended(served.one, batch["id"])
    assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    answer = (await rows(served.one, done["output_file_id"]))["a"]["response"]["body"]
    assert answer["object"] == "chat.completion"
    refused = await rows(served.one, done["error_file_id"])
    live = await served.one.post("/chat/completions", json=bad["body"])
    assert refused["b"]["response"]["status_code"] == live.status_code == 400
    assert refused["b"]["response"]["body"] == live.json()
    assert refused["c"]["response"]["body"]["error"]["param"] == "stream"
    kept = (await served.one.get(f"/files/{done['output_file_id']}")).json()
    assert kept["expires_at"] - kept["created_at"] == 3600


async def test_responses_are_answered_and_kept(served: Served) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 3}
    good = {"custom_id": "a", "method": "POST", "url": RESPONSES, "body": body}
    bad = good | {"custom_id": "b", "body": body | {"background": True}}
    lines = [json.dumps(each) + "\n" for each in (good, bad)]
    batch = await asked(served.one, *lines, endpoint=RESPONSES)
    async with served.working():
        done = await ended(served.one, batch["id"])
    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    response = (await rows(served.one, done["output_file_id"]))["a"]["response"]["body"]
    assert response["object"] == "response"
    assert (await served.one.get(f"/responses/{response['id']}")).json() == response
    assert (await served.two.get(f"/responses/{response['id']}")).status_code == 404
    refused = await rows(served.one, done["error_file_id"])
    assert refused["b"]["response"]["body"]["error"]["param"] == "background"


async def test_an_engine_that_is_full_is_asked_again(served: Served) -> None:
    refusals = iter(range(2))

    def script(record: RequestRecord) -> Sequence[Batch]:
        full = failing(ErrorCode.OVERLOADED, retry_after_s=0.01)
        return full(record) if next(refusals, None) is not None else play([5])(record)

    served.gateway.engine.script = script
    batch = await asked(served.one, line("a"))
    async with served.working():
        done = await ended(served.one, batch["id"])
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_file_with_faults_is_told_by_line(served: Served) -> None:
    batch = await asked(served.one, line("a"), "no JSON\n", line("a"))
    async with served.working():
        done = await ended(served.one, batch["id"])
    assert (done["status"], done["output_file_id"], done["error_file_id"]) == ("failed", None, None)
    found = [(error["code"], error["line"]) for error in done["errors"]["data"]]
    assert found == [("invalid_json_line", 2), ("duplicate_custom_id", 3)]
    assert not served.gateway.engine.generations


async def test_adapters_that_are_found_by_their_names_answer_batches(tmp_path: Path) -> None:
    """Even if no earlier request has named them at this gateway."""
    found, lost = (write(tmp_path / "adapters" / name) for name in ("found", "lost"))
    (lost / WEIGHTS).unlink()
    served = Served(tmp_path, lora_dir=str(tmp_path / "adapters"), lora_resolver=True)
    batches = [await asked(served.one, line("a", model=name)) for name in ("found", "lost", "none")]
    async with served.working(), asyncio.timeout(60):
        done = [await ended(served.one, batch["id"]) for batch in batches]
    served.gateway.context.pool.close()
    assert [one["status"] for one in done] == ["completed", "completed", "failed"]
    assert [one["request_counts"]["completed"] for one in done] == [1, 0, 0]
    assert [error["code"] for error in done[2]["errors"]["data"]] == ["model_not_found"]
    asked_for = [one.record.adapter for one in served.gateway.engine.generations]
    assert {adapter.digest for adapter in asked_for if adapter} == {identify(found, 1000).digest}


async def test_cancelling_keeps_what_is_done(served: Served) -> None:
    never = asyncio.Event()
    served.gateway.engine.script = lambda record: (
        play([5])(record) if len(served.gateway.engine.generations) == 0 else [never]
    )
    batch = await asked(served.one, line("a"), line("b"))
    async with served.working():
        await until(lambda: len(served.gateway.engine.generations) == 2)
        answer = await served.one.post(f"/batches/{batch['id']}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
        done = await ended(served.one, batch["id"])
    assert done["status"] == "cancelled"
    codes = {row["error"]["code"] for row in (await rows(served.one, done["error_file_id"])).values()}
    assert codes == {"batch_cancelled"}
    assert sum(done["request_counts"][name] for name in ("completed", "failed")) == 2
    assert served.gateway.engine.generations[1].closed.is_set()
    answer = await served.one.post(f"/batches/{batch['id']}/cancel")
    assert (answer.status_code, error_code(answer.content)) == (400, "invalid_argument")


async def test_sec_22_a_batch_is_its_keys_own(served: Served) -> None:
    batch = await asked(served.one, line("a"))
    for path in (f"/batches/{batch['id']}", f"/batches?after={batch['id']}"):
        assert (await served.one.get(path)).status_code == 200
        assert (await served.two.get(path)).status_code == 404
    assert (await served.two.post(f"/batches/{batch['id']}/cancel")).status_code == 404
    assert (await served.two.get("/batches")).json()["data"] == []
    body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    answer = await served.two.post("/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_file_id")
    async with served.working():
        done = await ended(served.one, batch["id"])
    assert (await served.two.get(f"/files/{done['output_file_id']}/content")).status_code == 404


async def test_listing_goes_on_after_what_was_seen(served: Served) -> None:
    ids = [(await asked(served.one, line("a")))["id"] for _ in range(3)]
    page = BatchList.model_validate((await served.one.get("/batches?limit=2")).json())
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[2], ids[1]], True)
    rest = BatchList.model_validate((await served.one.get(f"/batches?limit=2&after={page.last_id}")).json())
    assert ([batch.id for batch in rest.data], rest.has_more) == ([ids[0]], False)
    for query in ("limit=0", "limit=101", "order=asc"):
        answer = await served.one.get(f"/batches?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/score"}, "endpoint"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {f"{i}": "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(served: Served, fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": await uploaded(served.one, line("a")), "endpoint": CHAT, "completion_window": "24h"}
    answer = await served.one.post("/batches", json=body | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await served.one.get("/batches")).json()["data"] == []


async def test_output_is_no_input_and_cancelling_says_nothing_else(served: Served) -> None:
    batch = await asked(served.one, line("a"))
    answer = await served.one.post(f"/batches/{batch['id']}/cancel", json={"why": "because"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "why")
    async with served.working():
        done = await ended(served.one, batch["id"])
    body = {"input_file_id": done["output_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    answer = await served.one.post("/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_file_id")


async def test_a_store_that_is_gone_is_a_503_that_says_when(served: Served) -> None:
    async def gone(*args: Any, **kwargs: Any) -> Any:
        raise unavailable("/secret/path", 3.0)

    batch = await asked(served.one, line("a"))
    served.store.get = served.store.put = served.store.page = gone
    body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    answers = [
        await served.one.post("/batches", json=body),
        await served.one.get("/batches"),
        await served.one.get(f"/batches/{batch['id']}"),
        await served.one.post(f"/batches/{batch['id']}/cancel"),
    ]
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert (await served.one.post("/completions", json=ASK)).status_code == 200


async def test_a_line_that_would_take_too_much_memory_is_refused(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, max_held_bytes=40_000)
    service = BatchService(gateway.context)
    with pytest.raises(PagodaError) as caught:
        await service.answer(COMPLETIONS, line("a", prompt="x" * 20_000).encode(), "")
    assert caught.value.code is ErrorCode.REQUEST_TOO_LARGE
    assert gateway.context.memory.held_bytes == 0


async def test_lines_keep_the_order_of_their_priorities(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, play([5]))
    async with gateway.client:
        await gateway.client.post("/v1/completions", json=ASK)
    job = Job(id="j", created=0, model=MODEL, records=(gateway.engine.record,))
    [record] = behind_all(job).records
    assert record.priority == in_background(0)
    assert record.request_id == gateway.engine.record.request_id
