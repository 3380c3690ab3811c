"""Requests with an Idempotency-Key: resumed, joined, repeated, refused, forgotten, at one gateway or at two."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.gateway.fakes_engine import MODEL, Batch, Gateway, failing, held_up, make_gateway, play
from tests.gateway.keys.flaky_store import FlakyStore
from tests.gateway.keys.whole_app import running_app

from pagoda_gateway.metrics import GatewayMetrics
from pagoda_gateway.routes import generating
from pagoda_gateway.store.interface import Store
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_gateway.store.tickets import JOBS, TICKETS, KeptTickets, ticket_name
from pagoda_gateway.tickets.tickets import WAYS, Tickets
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import Begun, RequestRecord

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
WHOLE = ASK | {"stream": False}
TEXT = "one two 🙂 three"


@asynccontextmanager
async def running(root: Path, kept_in: Store | None = None, batch: int = 1, **config: Any) -> AsyncIterator[Gateway]:
    gateway = make_gateway(root, kept_in=kept_in, **config)
    gateway.engine.script = play(gateway.ids(TEXT), batch=batch)
    try:
        yield gateway
    finally:
        await gateway.tickets.aclose()
        if kept_in is None:
            await gateway.context.store.aclose()


@asynccontextmanager
async def shared() -> AsyncIterator[Store]:
    store = SqliteStore(MEMORY)
    yield store
    await store.aclose()


async def post(
    gateway: Gateway, body: dict[str, Any], key: str | None = "k", last: str | None = None
) -> httpx.Response:
    path = RESPONSES if "input" in body else CHAT
    named = {"Idempotency-Key": key, "Last-Event-ID": last}
    headers = {name: value for name, value in named.items() if value is not None}
    return await gateway.client.post(path, json=body, headers=headers)


def ids_of(stream: str) -> list[str]:
    return [line[4:] for line in stream.split("\n") if line.startswith("id: ")]


def text_of(stream: str) -> str:
    events = [line[6:] for line in stream.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def after(stream: str, last: str) -> str:
    """What follows the event with this id."""
    return stream.partition(f"id: {last}\n")[2].partition("\n\n")[2]


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def left(gateway: Gateway, body: dict[str, Any], key: str = "k") -> None:
    """A client that sends a request, and disconnects while the engine core is held up."""
    gateway.engine.submitted.clear()
    asking = asyncio.create_task(post(gateway, body, key))
    await gateway.engine.submitted.wait()
    await gateway.engine.generations[-1].waiting.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_without_a_key_nothing_is_kept_and_events_have_no_ids(tmp_path: Path) -> None:
    store = FlakyStore()
    async with running(tmp_path, kept_in=store) as gateway:
        response = await post(gateway, ASK, key=None)
        assert text_of(response.text) == TEXT
        assert ids_of(response.text) == []
        assert "content-location" not in response.headers
        assert not store.calls["put"] + store.calls["append"] + store.calls["claim"]


async def test_a_stream_is_gone_on_with_behind_any_of_its_ids(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        first = await post(gateway, ASK)
        assert text_of(first.text) == TEXT
        place = first.headers["content-location"]
        for last in ids_of(first.text):
            again = await post(gateway, ASK, last=last)
            assert after(first.text, last) == again.text
            followed = await gateway.client.get(place, headers={"Last-Event-ID": last})
            assert followed.text == again.text
        assert (await gateway.client.get(place)).text == first.text
        assert len(gateway.engine.generations) == 1, "what has ended is kept"


async def test_how_a_request_was_answered_is_counted(tmp_path: Path) -> None:
    metrics = GatewayMetrics("m")
    async with running(tmp_path) as gateway:
        tickets = Tickets(gateway.context, metrics.watch_tickets(WAYS))
        gateway.app.routes.clear()
        gateway.app.include_router(generating.router(gateway.context, tickets))
        for _ in range(2):
            await post(gateway, WHOLE)
        await tickets.aclose()
        await post(gateway, WHOLE)
        await dropped_answers(gateway.context.store)
        await post(gateway, WHOLE)
        await tickets.aclose()
    counted = {
        way: metrics.registry.get_sample_value("pagoda_tickets_total", {"model_name": "m", "way": way}) for way in WAYS
    }
    assert counted["begun"] == counted["run again"] == 1
    assert sum(value or 0 for value in counted.values()) == 4


async def test_another_gateway_makes_what_the_first_one_did_not_tell(tmp_path: Path) -> None:
    async with shared() as store, running(tmp_path, store) as first, running(tmp_path, store, batch=4) as second:
        whole = await post(second, ASK, key="other")
        held_up(first)
        seen = ""
        asking = asyncio.create_task(post(first, ASK))
        await first.engine.submitted.wait()
        await first.engine.generations[-1].waiting.wait()
        response = await post(second, ASK)  # from the beginning, while the first one runs it
        assert (response.headers["idempotent-replayed"], text_of(response.text)) == ("true", TEXT)
        one, other = (gateway.engine.generations[-1].record for gateway in (first, second))
        assert other.request_id != one.request_id, "an engine core that has both would refuse the second"
        assert msgspec.structs.replace(other, request_id=one.request_id) == one
        for last in ids_of(response.text):
            seen = response.text[: response.text.index(after(response.text, last) or "\0")]
            rest = (await post(second, ASK, last=last)).text
            assert text_of(seen) + text_of(rest) == text_of(whole.text)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_who_asks_while_it_runs_reads_along(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        for body, path in ((ASK, 0), (WHOLE, 1)):
            go = held_up(gateway) if not path else held_up_again(gateway)
            key = f"k{path}"
            asking = [asyncio.create_task(post(gateway, body, key)) for _ in range(3)]
            await gateway.engine.submitted.wait()
            asking.append(asyncio.create_task(post(gateway, body, key)))
            go.set()
            one, *others = await asyncio.gather(*asking)
            assert all(other.text == one.text for other in others) or not path
            assert len(gateway.engine.generations) == 1 + path


def held_up_again(gateway: Gateway) -> asyncio.Event:
    gateway.engine.submitted.clear()
    gateway.engine.script = play(gateway.ids(TEXT))
    return held_up(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_repeated_as_it_was(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as gateway:
        body = ASK | {"stream": stream, "logprobs": True}
        first, again = [await post(gateway, body) for _ in range(2)]
        assert first.content == again.content
        assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
        assert len(gateway.engine.generations) == 1


async def test_another_request_under_the_same_key_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        assert (await post(gateway, WHOLE)).status_code == 200
        assert code_of(await post(gateway, WHOLE | {"seed": 1})) == (422, "idempotency_key_reused")
        other = {"model": MODEL, "prompt": "hi"}
        response = await gateway.client.post(COMPLETIONS, json=other, headers={"Idempotency-Key": "k"})
        assert code_of(response) == (422, "idempotency_key_reused")


async def test_what_is_answered_elsewhere_and_is_no_stream_is_asked_for_later(tmp_path: Path) -> None:
    async with shared() as store, running(tmp_path, store) as first, running(tmp_path, store) as second:
        go = held_up(first)
        asking = asyncio.create_task(post(first, WHOLE))
        await first.engine.submitted.wait()
        await first.engine.generations[-1].waiting.wait()
        refused = await post(second, WHOLE)
        assert code_of(refused) == (409, "request_in_progress")
        assert refused.headers["x-should-retry"] == "true"
        go.set()
        answer = await asking
        while (again := await post(second, WHOLE)).status_code == 409:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the first one is writing the answer
        assert again.content == answer.content
        assert not second.engine.generations


async def test_sec_08_a_stream_is_its_keys_own(tmp_path: Path) -> None:
    async with running_app(tmp_path) as app:
        app.gateway.engine.script = play(app.gateway.ids(TEXT))
        (_, mine), (_, other) = await app.new_key(), await app.new_key()
        first = await mine.post(CHAT, json=ASK, headers={"Idempotency-Key": "k"})
        place, last = first.headers["content-location"], ids_of(first.text)[2]
        assert (await mine.get(place, headers={"Last-Event-ID": last})).text == after(first.text, last)
        for method in ("GET", "DELETE"):
            assert (await other.request(method, place)).status_code == 404
        assert (await other.post(CHAT, json=ASK, headers={"Idempotency-Key": "k"})).status_code == 200
        assert len(app.gateway.engine.generations) == 2
        assert (await mine.delete(place)).json()["deleted"] is True
        assert (await mine.get(place)).status_code == 404


async def test_without_its_client_it_lives_as_long_as_it_was_told(tmp_path: Path) -> None:
    async with running(tmp_path, ticket_grace_s=0.0) as gateway:
        held_up(gateway)
        await left(gateway, ASK)
        async with asyncio.timeout(60):
            await gateway.engine.generations[-1].closed.wait()
    async with running(tmp_path, ticket_grace_s=60.0) as gateway:
        go = held_up(gateway)
        await left(gateway, ASK)
        assert not gateway.engine.generations[-1].closed.is_set()
        asking = asyncio.create_task(post(gateway, ASK))
        go.set()
        assert text_of((await asking).text) == TEXT
        assert len(gateway.engine.generations) == 1


async def test_it_ends_when_it_is_deleted_or_its_gateway_leaves(tmp_path: Path) -> None:
    async with running(tmp_path, ticket_grace_s=60.0) as gateway:
        for end in ("delete", "leave"):
            held_up_again(gateway)
            await left(gateway, ASK)
            generation = gateway.engine.generations[-1]
            if end == "delete":
                await gateway.client.delete(f"/v1/streams/{ticket_name('', 'k')}")
            else:
                await gateway.tickets.leave()
            async with asyncio.timeout(60):
                await generation.closed.wait()


@pytest.mark.parametrize("resumes", [True, False])
async def test_a_gateway_that_leaves_hands_over_what_its_reader_asks_for_elsewhere(
    tmp_path: Path, resumes: bool
) -> None:
    """Nothing is recomputed. A reader that would not resume elsewhere is served to the end."""
    lasting = {"store": f"sqlite://{tmp_path}/named-only"}
    async with shared() as store, running(tmp_path, store, **lasting) as first, running(tmp_path, store) as second:
        undisturbed = await post(second, ASK, key="other")
        go = held_up(first)
        headers = {"Idempotency-Key": "k"} | ({"Pagoda-Resumes": "1"} if resumes else {})
        asking = asyncio.create_task(first.client.post(CHAT, json=ASK, headers=headers))
        await first.engine.submitted.wait()
        await first.engine.generations[-1].waiting.wait()
        await first.tickets.leave()
        if not resumes:
            go.set()
            assert text_of((await asking).text) == TEXT
            return
        told = (await asking).text
        assert '"code":"unavailable"' in told
        rest = await post(second, ASK, last=ids_of(told)[-1])
        assert text_of(told.partition('data: {"error"')[0]) + text_of(rest.text) == text_of(undisturbed.text)
        assert sum(len(delta.tokens.token_ids) for delta in second.engine.priors[-1]) == 3


async def test_a_gateway_out_of_time_hands_over_what_is_no_stream(tmp_path: Path) -> None:
    async with shared() as store, running(tmp_path, store) as first, running(tmp_path, store) as second:
        held_up(first)
        asking = asyncio.create_task(post(first, WHOLE))
        await first.engine.submitted.wait()
        await first.engine.generations[-1].waiting.wait()
        await first.tickets.hand_over_all()
        assert code_of(await asking) == (503, "unavailable")
        again = (await post(second, WHOLE)).json()
        assert again["choices"][0]["message"]["content"] == TEXT
        assert second.engine.priors[-1]


async def test_a_reader_is_told_when_it_was_deleted(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        held_up(gateway)
        asking = asyncio.create_task(post(gateway, ASK))
        await gateway.engine.submitted.wait()
        await gateway.engine.generations[-1].waiting.wait()
        await gateway.client.delete(f"/v1/streams/{ticket_name('', 'k')}")
        assert '"code":"cancelled"' in (await asking).text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_store_that_is_gone_stands_in_nobodys_way(tmp_path: Path, stream: bool) -> None:
    store = FlakyStore()
    store.gone = True
    async with running(tmp_path, kept_in=store) as gateway:
        response = await post(gateway, ASK | {"stream": stream})
        assert (response.status_code, response.headers["idempotency-status"]) == (200, "unavailable")
        assert ids_of(response.text) == []
        assert (text_of(response.text) if stream else response.json()["choices"][0]["message"]["content"]) == TEXT


@pytest.mark.parametrize("fault", ["gone", "unreadable"])
async def test_nothing_is_gone_on_with_from_its_beginning(tmp_path: Path, fault: str) -> None:
    """A client that has part of a stream would receive that part twice."""
    store = FlakyStore()
    async with running(tmp_path, kept_in=store) as gateway:
        last = ids_of((await post(gateway, ASK)).text)[2]
        store.gone = fault == "gone"
        if fault == "unreadable":
            await store.put(TICKETS, ticket_name("", "k"), b"\xff{", owner="")
        refused = await post(gateway, ASK, last=last)
        assert code_of(refused) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) > 0
        if fault == "unreadable":
            assert text_of((await post(gateway, ASK)).text) == TEXT
            assert (await post(gateway, ASK, key="other")).headers["content-location"]


async def test_a_stream_that_nobody_knows_any_more_is_not_begun_for_who_has_a_part_of_it(tmp_path: Path) -> None:
    store = FlakyStore()
    async with running(tmp_path, kept_in=store) as gateway:
        last = ids_of((await post(gateway, ASK)).text)[2]
        await store.delete(TICKETS, ticket_name("", "k"))
        assert code_of(await post(gateway, ASK, last=last)) == (404, "not_found")
        assert len(gateway.engine.generations) == 1


@pytest.mark.parametrize("loss", ["emptied", "begun anew elsewhere"])
async def test_a_store_that_loses_what_it_had_ends_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """An expired ticket looks the same."""
    monkeypatch.setattr(times, "TICKET_LEASE_S", 0.03)
    store = FlakyStore()
    async with running(tmp_path, kept_in=store) as gateway, running(tmp_path, kept_in=store) as other:
        go = held_up(gateway)
        asking = asyncio.create_task(post(gateway, ASK))
        await gateway.engine.submitted.wait()
        await gateway.engine.generations[-1].waiting.wait()
        await store.delete(TICKETS, ticket_name("", "k"))
        if loss == "begun anew elsewhere":
            await post(other, ASK)
        store.calls.clear()
        async with asyncio.timeout(60):
            while store.calls["claim"] < 3:  # noqa: ASYNC110 - it has looked since
                await asyncio.sleep(0.01)
        go.set()
        assert text_of((await asking).text) == TEXT
        assert text_of((await post(gateway, ASK)).text) == TEXT


@pytest.mark.parametrize("asked", ["here at once", "elsewhere after a while"])
async def test_a_stream_that_the_store_has_lost_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    elsewhere = asked == "elsewhere after a while"
    monkeypatch.setattr(times, "TICKET_LEASE_S", 0.03 if elsewhere else 600.0)
    store, name = FlakyStore(), ticket_name("", "k")
    async with running(tmp_path, kept_in=store) as gateway, running(tmp_path, kept_in=store) as other:
        go = held_up(gateway)
        asking = asyncio.create_task(post(gateway, ASK))
        await gateway.engine.submitted.wait()
        await gateway.engine.generations[-1].waiting.wait()
        ticket = (await store.get(TICKETS, name)).value
        await store.delete(JOBS, msgspec.json.decode(ticket)["job_id"])
        await store.delete(TICKETS, name)
        again = asyncio.create_task(post(gateway, ASK)) if not elsewhere else None
        async with asyncio.timeout(60):
            while await store.get(TICKETS, name) is None:  # noqa: ASYNC110 - the store tells nobody
                await asyncio.sleep(0.01)
        again = again or asyncio.create_task(post(other, ASK))
        go.set()
        assert text_of((await again).text) == text_of((await asking).text) == TEXT
        last = ids_of((await asking).text)[2]
        assert text_of((await post(gateway, ASK, last=last)).text) == text_of(after((await asking).text, last))
        assert len(gateway.engine.generations) == 1


async def test_a_stream_that_is_deleted_at_another_gateway_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "TICKET_LEASE_S", 0.03)
    async with shared() as store, running(tmp_path, store) as first, running(tmp_path, store) as second:
        held_up(first)
        asking = asyncio.create_task(post(first, ASK))
        await first.engine.submitted.wait()
        await first.engine.generations[-1].waiting.wait()
        await second.client.delete(f"/v1/streams/{ticket_name('', 'k')}")
        assert '"code":"cancelled"' in (await asking).text


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"job_id": 1}'])
async def test_a_job_that_cannot_be_read_is_told_in_words(tmp_path: Path, value: bytes) -> None:
    async with running(tmp_path) as gateway:
        await post(gateway, ASK)
        store = gateway.context.store
        (record,) = (await store.page(JOBS, "", limit=10)).records
        await store.put(JOBS, record.key, value, owner=record.owner)
        for response in (await post(gateway, ASK), await gateway.client.get(f"/v1/streams/{ticket_name('', 'k')}")):
            assert code_of(response) == (503, "unavailable")


async def test_what_is_kept_of_a_tenant_is_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, max_tickets=2) as gateway:
        found = [code for i in range(3) if (code := (await post(gateway, WHOLE, f"k{i}")).status_code)]
        assert found == [200, 200, 429]
        assert 1 <= int((await post(gateway, WHOLE, "k3")).headers["retry-after"]) <= times.TICKET_RESTS_S
    async with running(tmp_path, max_tickets_bytes=100) as gateway:
        assert code_of(await post(gateway, WHOLE)) == (413, "request_too_large")
    async with running(tmp_path) as gateway:
        prompts = {"model": MODEL, "prompt": ["hi"] * 100, "n": 2, "stream": True}
        response = await gateway.client.post(COMPLETIONS, json=prompts, headers={"Idempotency-Key": "k"})
        assert (code_of(response), response.json()["error"]["param"]) == ((400, "invalid_argument"), "n")


async def test_the_oldest_answers_make_room_for_new_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "TICKET_RESTS_S", 0.0)
    async with running(tmp_path, max_tickets=3) as gateway:
        assert [(await post(gateway, WHOLE, f"k{i}")).status_code for i in range(8)] == [200] * 8
        assert len((await gateway.context.store.page(TICKETS, "", limit=10)).records) == 3
        assert len((await gateway.context.store.page(JOBS, "", limit=10)).records) == 3
        asked_again = [await post(gateway, WHOLE, key) for key in ("k7", "k0")]
        assert ["idempotent-replayed" in response.headers for response in asked_again] == [True, False]


async def test_what_takes_most_makes_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "TICKET_RESTS_S", 0.0)
    monkeypatch.setattr(times, "TICKETS_FRESH_S", 0.0)
    async with running(tmp_path, max_tickets_bytes=4000) as gateway:
        assert [(await post(gateway, WHOLE, f"k{i}")).status_code for i in range(12)] == [200] * 12
        held = await KeptTickets(gateway.context.store, 1.0).held_by("")
        assert 1 <= held.number < 12
        assert held.num_bytes < 2 * 4000  # an answer is counted when the next one arrives


async def test_what_is_not_answered_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "TICKET_RESTS_S", 0.0)
    async with running(tmp_path, max_tickets=2) as gateway:
        go = held_up(gateway)
        streams = [asyncio.create_task(post(gateway, ASK, f"stream{i}")) for i in range(2)]
        while len((await gateway.context.store.page(TICKETS, "", limit=10)).records) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert code_of(await post(gateway, WHOLE, "other")) == (429, "rate_limit_exceeded")
        go.set()
        assert [(await stream).status_code for stream in streams] == [200, 200]
        monkeypatch.setattr(times, "TICKETS_FRESH_S", 0.0)
        assert (await post(gateway, WHOLE, "other")).status_code == 200


@pytest.mark.parametrize("end", ["overloaded", "left", "no room for its answer"])
async def test_whatever_ended_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(times, "TICKET_RESTS_S", 0.0)
    async with running(tmp_path, max_tickets=2, ticket_grace_s=0.0) as gateway:
        plain = gateway.engine.script
        if end == "overloaded":
            gateway.engine.script = failing(ErrorCode.OVERLOADED)
        elif end == "left":
            held_up(gateway)
        else:
            monkeypatch.setattr("pagoda_gateway.tickets.tickets.MAX_APPEND_BYTES", 1)
        for i in range(2):
            await (left(gateway, ASK, f"k{i}") if end == "left" else post(gateway, WHOLE, f"k{i}"))
        gateway.engine.script = plain
        async with asyncio.timeout(60):
            while gateway.tickets._live:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await post(gateway, WHOLE, "new")).status_code == 200


async def test_a_request_that_cannot_be_kept_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "TICKET_RESTS_S", 0.0)
    async with running(tmp_path, max_tickets=1) as gateway:
        await post(gateway, WHOLE, "kept")
        monkeypatch.setattr("pagoda_gateway.store.tickets.MAX_VALUE_BYTES", 100)
        assert code_of(await post(gateway, WHOLE, "large")) == (413, "request_too_large")
        assert "idempotent-replayed" in (await post(gateway, WHOLE, "kept")).headers


async def test_it_is_forgotten_by_and_by(tmp_path: Path) -> None:
    async with running(tmp_path, keep_tickets_s=0.2) as gateway:
        await post(gateway, WHOLE)
        async with asyncio.timeout(60):
            while await gateway.context.store.get(TICKETS, ticket_name("", "k")) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert "idempotent-replayed" not in (await post(gateway, WHOLE | {"seed": 1})).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_two_gateways_that_are_asked_at_once_have_one_ticket(tmp_path: Path, stream: bool) -> None:
    body = ASK | {"stream": stream, "temperature": 1.0}
    async with shared() as store, running(tmp_path, store) as first, running(tmp_path, store) as second:
        answers = await asyncio.gather(*(post(gateway, body) for gateway in (first, second, first, second)))
        for collection in (TICKETS, JOBS):
            assert len((await store.page(collection, "", limit=10)).records) == 1
        told = {answer.text for answer in answers if answer.status_code == 200}
        assert {answer.status_code for answer in answers} <= ({200} if stream else {200, 409})
        ids = {json.loads(text.split("data: ")[1].split("\n")[0] if stream else text)["id"] for text in told}
        seeds = {generation.record.task.seed for one in (first, second) for generation in one.engine.generations}
        assert len(ids) == len(seeds) == 1


async def test_nothing_goes_on_with_what_other_weights_began(tmp_path: Path) -> None:
    async with shared() as store, running(tmp_path, store) as first, running(tmp_path, store) as second:
        ids = ids_of((await post(first, ASK)).text)
        await dropped_answers(store)
        whole = second.engine.script

        def changed(record: RequestRecord) -> list[Batch]:
            batches = list(whole(record))
            assert isinstance(batches[0], list)
            batches[0][0].result.begun = Begun(model_fingerprint="fp-other", numerics_id="any")
            return batches

        second.engine.script = changed
        assert code_of(await post(second, ASK, last=ids[0])) == (503, "stream_interrupted")
        assert text_of((await post(second, ASK)).text) == TEXT, "from its beginning it may be made anew"


async def dropped_answers(store: Store) -> None:
    """As if the answers had been too large to keep; they are stored shortly after they were sent."""
    tickets: list[Any] = [{}]
    while not all("answer" in ticket for ticket in tickets):
        await asyncio.sleep(0.01)
        tickets = [json.loads(record.value) for record in (await store.page(TICKETS, "", limit=10)).records]
    for ticket in tickets:
        await store.drop(f"ticket/{ticket['job_id']}/answer/{ticket['answer']}")


async def test_a_background_response_is_begun_once(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        gateway.background.start()
        ask = {"model": MODEL, "input": "hi", "background": True}
        async with aclosing(gateway.background):
            first, again = [await post(gateway, ask) for _ in range(2)]
            assert first.json()["id"] == again.json()["id"]
            assert again.headers["idempotent-replayed"] == "true"
            assert code_of(await post(gateway, ask | {"seed": 1})) == (422, "idempotency_key_reused")
            assert (await gateway.client.get(f"/v1/streams/{ticket_name('', 'k')}")).status_code == 404
