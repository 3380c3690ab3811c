"""The usage of keys, as shown to them and to an admin; and how clients of both APIs see their limits."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.gateway.fakes_engine import MODEL, NUM_CACHED, breaking, failing, play
from tests.gateway.http_fakes import running_http
from tests.gateway.keys.whole_app import running_app

from pagoda_gateway.api.accounts.schemas import UsageAnswer
from pagoda_gateway.keys.grants import Limits, Role
from pagoda_gateway.routes.batch_service import BatchService
from pagoda_proto.errors import ErrorCode, PagodaError

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/usage"


def today() -> str:
    return datetime.now(UTC).date().isoformat()


async def asked(client: httpx.AsyncClient, **query: str) -> dict[str, Any]:
    answer = await client.get(PATH, params=query)
    assert answer.status_code == 200, answer.text
    UsageAnswer.model_validate(answer.json())
    found: dict[str, Any] = answer.json()
    return found


async def test_each_key_sees_its_own_and_an_admin_all(tmp_path: Path) -> None:
    async with running_app(tmp_path, play([72, 73, 74]), key_requests_per_minute=1000) as app:
        (ann, ann_asks), (bob, bob_asks) = await app.new_key(), await app.new_key()
        sizes = []
        for client, times in ((ann_asks, 2), (bob_asks, 1)):
            for stream in (False, True)[:times]:
                await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
                sizes.append(len(app.gateway.engine.generations[-1].record.prompt_token_ids))
        await ann_asks.post("/v1/messages", json=CHAT | {"model": "absent", "max_tokens": 1})
        size = sizes[0]
        row = {"day": today(), "model": MODEL}
        used = {"prompt_tokens": size, "cached_prompt_tokens": NUM_CACHED, "output_tokens": 3}
        anns = row | {"key_id": ann.id, "requests": 2} | {name: 2 * value for name, value in used.items()}
        bobs = row | {"key_id": bob.id, "requests": 1} | used
        assert (await asked(ann_asks))["data"] == (await asked(ann_asks, key_id=ann.id))["data"] == [anns]
        assert (await asked(bob_asks))["data"] == (await asked(app.admin, key_id=bob.id))["data"] == [bobs]
        both = await asked(app.admin)
        assert sorted(both["data"], key=lambda one: -one["requests"]) == [anns, bobs]
        assert both["total"] == {"requests": 3} | {name: 3 * value for name, value in used.items()}
        refused = await ann_asks.get(PATH, params={"key_id": bob.id})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "key_id")
        assert (await asked(app.admin, **{"from": "2020-01-01", "to": "2020-02-01"}))["data"] == []


async def test_as_a_table(tmp_path: Path) -> None:
    async with running_app(tmp_path, play([72])) as app:
        key, client = await app.new_key()
        await client.post("/v1/completions", json={"prompt": ["hello", "hello"]})
        by_query = await client.get(PATH, params={"format": "csv"})
        by_header = await client.get(PATH, headers={"accept": "text/csv, */*;q=0.1"})
        assert by_query.text == by_header.text
        assert by_query.headers["content-type"].startswith("text/csv")
        (row,) = csv.DictReader(io.StringIO(by_query.text))
        assert (row["day"], row["key_id"], row["model"], row["requests"]) == (today(), key.id, MODEL, "1")
        assert row["output_tokens"] == "2"
        as_json = await client.get(PATH, params={"format": "json"}, headers={"accept": "text/csv"})
        assert as_json.json()["total"]["output_tokens"] == 2


async def test_without_keys_there_is_one_row_for_everybody(tmp_path: Path) -> None:
    async with running_app(tmp_path, play([72]), admin_api_key="") as app:
        await app.client().post("/v1/chat/completions", json=CHAT)
        (row,) = (await asked(app.client()))["data"]
        assert (row["key_id"], row["requests"]) == (None, 1)


async def test_what_failed_is_counted_as_far_as_it_went_and_what_was_refused_is_not(tmp_path: Path) -> None:
    async with running_app(tmp_path, breaking(72, 73)) as app:
        _, client = await app.new_key()
        for stream in (False, True):
            await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        app.gateway.engine.script = failing()
        for stream in (False, True):
            await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        total = (await asked(client))["total"]
        assert (total["requests"], total["output_tokens"]) == (2, 4)


async def test_a_stream_that_its_client_left_is_counted_as_far_as_it_went(tmp_path: Path) -> None:
    def never_ending(record: Any) -> list[Any]:
        batches = list(play([72, 73, 74])(record))
        return [*batches[:2], asyncio.Event()]

    async with running_app(tmp_path, never_ending) as app, running_http(app.asgi, app.gateway.context.config) as http:
        _, client = await app.new_key()
        key = client.headers["authorization"]
        socket = httpx.AsyncClient(base_url=f"http://127.0.0.1:{http.port}", headers={"authorization": key}, timeout=60)
        async with socket:
            async with socket.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}):
                await app.gateway.engine.generations[0].waiting.wait()
            await app.gateway.engine.generations[0].closed.wait()
            total = (await asked(socket))["total"]
        assert (total["requests"], total["output_tokens"]) == (1, 2)


BAD: list[tuple[dict[str, str], str]] = [
    ({"from": "yesterday"}, "from"),
    ({"to": "2026-13-01"}, "to"),
    ({"from": "2026-02-02", "to": "2026-02-01"}, "from"),
    ({"from": "2020-01-01", "to": "2026-01-01"}, "from"),
    ({"format": "xml"}, "format"),
    ({"days": "3"}, "days"),
    ({"from_": "2026-01-01"}, "from_"),
]


async def test_a_bad_query_is_a_400_that_names_it(tmp_path: Path) -> None:
    async with running_app(tmp_path) as app:
        for query, param in BAD:
            answer = await app.admin.get(PATH, params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await asked(app.admin, to="0001-01-01"))["from"] == "0001-01-01"


async def test_a_limited_key_is_told_what_is_left_and_then_when_to_come_back(tmp_path: Path) -> None:
    async with running_app(tmp_path, play([72])) as app, running_http(app.asgi, app.gateway.context.config) as http:
        _, keyed = await app.new_key(limits=Limits(requests_per_minute=3, tokens_per_minute=10_000))
        url = f"http://127.0.0.1:{http.port}"
        options: Any = {
            "api_key": keyed.headers["authorization"].removeprefix("Bearer "),
            "max_retries": 0,
            "timeout": 60,
        }
        by_openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)
        by_anthropic = anthropic.AsyncAnthropic(base_url=url, **options)
        ask: Any = {"model": MODEL} | CHAT
        first = (await by_openai.chat.completions.with_raw_response.create(**ask)).headers
        assert (first["x-ratelimit-limit-requests"], first["x-ratelimit-remaining-requests"]) == ("3", "2")
        size = len(app.gateway.engine.generations[0].record.prompt_token_ids)
        assert first["x-ratelimit-limit-tokens"] == "10000"
        assert 10_000 - size - 1 <= int(first["x-ratelimit-remaining-tokens"]) < 10_000
        assert first["x-ratelimit-reset-requests"].endswith("s")
        second = (await by_anthropic.messages.with_raw_response.create(**ask, max_tokens=5)).headers
        assert second["anthropic-ratelimit-requests-remaining"] == "1"
        reset = datetime.fromisoformat(second["anthropic-ratelimit-requests-reset"])
        assert 0 < (reset - datetime.now(UTC)).total_seconds() <= 41
        assert not [name for name in second if name.startswith("x-ratelimit")]
        with pytest.raises(openai.NotFoundError) as missing:
            await by_openai.models.retrieve("absent")
        assert missing.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as refused:
            await by_openai.chat.completions.create(**ask)
        last = refused.value.response.headers
        assert (refused.value.code, last["x-should-retry"]) == ("rate_limit_exceeded", "true")
        assert 0 < int(last["retry-after-ms"]) <= 20_000
        assert int(last["retry-after"]) * 1000 >= int(last["retry-after-ms"])
        with pytest.raises(anthropic.RateLimitError) as refused_there:
            await by_anthropic.messages.create(**ask, max_tokens=5)
        body: Any = refused_there.value.body
        assert body["error"]["type"] == "rate_limit_error"
        await by_openai.close()
        await by_anthropic.close()
        _, free = await app.new_key()
        assert not [name for name in (await free.get("/v1/models")).headers if "ratelimit" in name]


async def test_output_is_owed_and_a_prompt_that_never_fits_is_said_to_be_so(tmp_path: Path) -> None:
    async with running_app(tmp_path, play([72] * 200), key_tokens_per_minute=100) as app:
        _, client = await app.new_key()
        too_long = await client.post("/v1/completions", json={"prompt": [72] * 101})
        assert (too_long.status_code, too_long.headers["x-should-retry"]) == (413, "false")
        answer = await client.post("/v1/completions", json={"prompt": [72] * 10, "max_tokens": 200})
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
        refused = await client.post("/v1/completions", json={"prompt": [72]})
        assert refused.status_code == 429
        assert 60 < int(refused.headers["retry-after"]) <= (110 + 1) * 60 / 100 + 1
        _, other = await app.new_key(role=Role.ADMIN, limits=Limits(tokens_per_minute=0))
        assert (await other.post("/v1/completions", json={"prompt": [72] * 101})).status_code == 200


async def test_requests_at_once_and_their_ends(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with running_app(tmp_path, lambda record: [go_on, *play([72])(record)], key_concurrent_requests=1) as app:
        _, client = await app.new_key()
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await app.gateway.engine.submitted.wait()
        refused = await client.get("/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await client.get("/health/live")).status_code != 429
        go_on.set()
        assert (await first).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_line_of_a_batch_has_the_grant_of_its_key_and_is_counted_beside_its_limits(tmp_path: Path) -> None:
    async with running_app(tmp_path, play([72, 73]), key_tokens_per_minute=1) as app:
        service = BatchService(app.gateway.context)
        may, client = await app.new_key(models=(MODEL,))
        may_not, _ = await app.new_key(models=("other",))
        line = json.dumps({"body": {"prompt": "hello", "model": MODEL}}).encode()
        assert await service.answer("/v1/completions", line, may.id)
        with pytest.raises(PagodaError) as caught:
            await service.answer("/v1/completions", line, may_not.id)
        assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
        assert (await asked(app.admin))["total"]["output_tokens"] == 2
        assert (await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"] == "1"
        revoked, _ = await app.new_key()
        await app.gateway.context.keys.revoke(revoked.id)
        with pytest.raises(PagodaError) as caught:
            await service.answer("/v1/completions", line, revoked.id)
        assert caught.value.code is ErrorCode.INVALID_API_KEY
