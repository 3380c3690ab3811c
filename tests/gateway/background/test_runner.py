"""Background responses: started here, followed, finished, and continued by another gateway with the same store."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from tests.gateway.fakes_engine import MODEL, Gateway, held_up, make_gateway, play
from tests.gateway.keys.flaky_store import FlakyStore
from tests.gateway.responses import PATH, events_of, get, refusal
from tests.gateway.store.breaking_store import Breaking, How

from pagoda_gateway.api.encoding import event
from pagoda_gateway.api.responses_schemas import ResponsesRequest
from pagoda_gateway.background import live
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.clients import NOBODY
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.responses import responses_job
from pagoda_gateway.generation.job import Job
from pagoda_gateway.store.interface import Store, unavailable
from pagoda_gateway.store.responses import RESPONSES, UNFINISHED, KeptResponses
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

ASK = {"model": MODEL, "input": "hello", "background": True}
TEXT = "one two three four"


@asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[Gateway]:
    gateway.background.start()
    try:
        yield gateway
    finally:
        await gateway.background.aclose()


def half_said(gateway: Gateway, num_batches: int) -> asyncio.Event:
    """The model generates this many batches of the text, and the rest after the event."""
    gateway.engine.script = play(gateway.ids(TEXT))
    return held_up(gateway, num_batches)


async def begin(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(PATH, json=ASK | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def until(gateway: Gateway, name: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (answer := await get(gateway, name))["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return answer


async def followed(gateway: Gateway, name: str, **query: Any) -> list[dict[str, Any]]:
    response = await gateway.client.get(f"{PATH}/{name}", params={"stream": True} | query)
    assert response.status_code == 200, response.text
    return events_of(response.text) if response.text else []


def text_of(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


def keeping_in(context: GatewayContext, store: Store) -> GatewayContext:
    return replace(context, store=store, responses=KeptResponses(store, 3600.0))


async def test_it_answers_at_once_and_has_its_answer_later(tmp_path: Path) -> None:
    async with running(make_gateway(tmp_path)) as gateway:
        go = half_said(gateway, 2)
        answer = await begin(gateway)
        assert answer["status"] == "queued"
        assert (await until(gateway, answer["id"], "in_progress"))["background"] is True
        go.set()
        ended = await until(gateway, answer["id"], "incomplete")
        assert text_of(ended) == TEXT
        assert (await refusal(gateway, 400, "GET", f"/{answer['id']}", stream=True))["param"] == "stream"


async def test_a_stream_that_was_left_is_read_on(tmp_path: Path) -> None:
    async with running(make_gateway(tmp_path)) as gateway:
        go = half_said(gateway, 2)
        asking = asyncio.create_task(gateway.client.post(PATH, json=ASK | {"stream": True}))
        await gateway.engine.submitted.wait()
        name = f"resp_{gateway.engine.record.request_id}"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        go.set()
        await until(gateway, name, "incomplete")
        events = await followed(gateway, name)
        assert events[0]["type"] == "response.created"
        assert text_of(events[-1]["response"]) == TEXT
        for last in (0, 4, len(events) - 2, len(events) - 1):
            assert await followed(gateway, name, starting_after=last) == events[last + 1 :]


async def test_who_reads_slowly_is_told_the_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where so many events came in between that they are only in the store."""
    async with running(make_gateway(tmp_path)) as gateway:
        go = half_said(gateway, 2)
        job = await responses_job(gateway.context, ResponsesRequest.model_validate(ASK | {"stream": True}), NOBODY)
        await gateway.background.begin(job)
        following = gateway.background.follow(job.id, "", 0)
        events = [await anext(following)]
        monkeypatch.setattr(live, "MOST_EVENTS", 2)
        go.set()
        await until(gateway, job.id, "incomplete")
        events += [one async for one in following]
        assert events == [one async for one in gateway.context.responses.events(job.id)]


async def test_another_gateway_goes_on_with_it(tmp_path: Path) -> None:
    first = make_gateway(tmp_path)
    go = half_said(first, 3)
    async with running(first):
        name = (await begin_stream(first, 6))["response"]["id"]
    second = make_gateway(tmp_path)
    second.context = keeping_in(second.context, first.context.store)
    other = BackgroundResponses(second.context)
    second.engine.script = play(second.ids(TEXT), batch=2)
    other.start()
    try:
        events = [one async for one in other.follow(name, "", 0)]
    finally:
        await other.aclose()
    told = events_of(b"".join(events).decode())
    assert not go.is_set()
    assert told[0]["sequence_number"] == 0
    assert "".join(one["delta"] for one in told if "delta" in one) == TEXT
    assert text_of(told[-1]["response"]) == TEXT
    assert [one["type"] for one in told].count("response.created") == 1
    assert second.engine.record == first.engine.record
    today = datetime.now(UTC).date()
    used = [await gateway.context.ledger.rows([""], today, today) for gateway in (first, second)]
    assert [[row.counts.requests for row in rows] for rows in used] == [[], [1]]  # by the gateway that told the end
    assert used[1][0].counts.output_tokens == len(second.ids(TEXT))


async def begin_stream(gateway: Gateway, num_events: int) -> dict[str, Any]:
    """Request a stream; of its first `num_events` events, return the last that contains the response."""
    asking = asyncio.create_task(gateway.client.post(PATH, json=ASK | {"stream": True}))
    await gateway.engine.submitted.wait()
    name = f"resp_{gateway.engine.record.request_id}"
    count, last = 0, b""
    async for one in gateway.background.follow(name, "", 0):
        count, last = count + 1, one if b'"response":' in one else last
        if count == num_events:
            break
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    event: dict[str, Any] = json.loads(last.decode().split("data: ")[1])
    return event


async def test_it_is_cancelled_where_it_runs(tmp_path: Path) -> None:
    async with running(make_gateway(tmp_path)) as gateway:
        half_said(gateway, 2)
        name = (await begin(gateway))["id"]
        await gateway.engine.submitted.wait()
        response = await gateway.client.post(f"{PATH}/{name}/cancel")
        assert response.json()["status"] == "cancelled"
        assert await get(gateway, name) == response.json()
        assert gateway.engine.generations[0].closed.is_set()
        again = await gateway.client.post(f"{PATH}/{name}/cancel")
        assert again.json()["status"] == "cancelled"


async def test_only_what_runs_in_the_background_is_cancelled(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, play([5]))
    name = (await gateway.client.post(PATH, json=ASK | {"background": False})).json()["id"]
    assert (await refusal(gateway, 400, path=f"/{name}/cancel"))["param"] == "response_id"


async def test_one_that_is_deleted_ends_and_is_gone(tmp_path: Path) -> None:
    async with running(make_gateway(tmp_path)) as gateway:
        half_said(gateway, 2)
        name = (await begin(gateway))["id"]
        await gateway.engine.submitted.wait()
        assert (await gateway.client.delete(f"{PATH}/{name}")).json()["deleted"] is True
        await gateway.engine.generations[0].closed.wait()
        await refusal(gateway, 404, "GET", f"/{name}")


async def test_no_more_run_than_are_allowed(tmp_path: Path) -> None:
    async with running(make_gateway(tmp_path, max_background_responses=1)) as gateway:
        go = half_said(gateway, 2)
        name = (await begin(gateway))["id"]
        response = await gateway.client.post(PATH, json=ASK)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in response.headers
        go.set()
        await until(gateway, name, "incomplete")


class Failing:
    """A store in which, after the first few, every fourth write is done but reports a failure."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._calls = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        async def called(*words: Any, **options: Any) -> Any:
            result = await call(*words, **options)
            number = next(self._calls) if name in ("append", "put", "keep_until") else 0
            if number > 8 and number % 4 == 0:
                raise unavailable("as the test wants it", 0.01)
            return result

        return called


async def test_a_store_that_fails_now_and_then_costs_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "RESPONSE_WRITE_S", 0.0)
    monkeypatch.setattr(times, "STORE_REST_S", 0.01)
    gateway = make_gateway(tmp_path)
    gateway.context = keeping_in(gateway.context, cast(Store, Failing(gateway.context.store)))
    background = BackgroundResponses(gateway.context)
    gateway.engine.script = play(gateway.ids(TEXT))
    body = ResponsesRequest.model_validate(ASK | {"stream": True})
    job = await responses_job(gateway.context, body, NOBODY)
    await background.begin(job)
    told = events_of(b"".join([one async for one in background.follow(job.id, "", 0)]).decode())
    assert told[0]["sequence_number"] == 0
    assert "".join(one["delta"] for one in told if "delta" in one) == TEXT
    kept = b"".join([one async for one in gateway.context.responses.events(job.id)])
    assert events_of(kept.decode()) == told
    await background.aclose()


class Other:
    """Another gateway with the store of `first`, which no longer runs anything."""

    def __init__(self, root: Path, first: Gateway) -> None:
        self.gateway = make_gateway(root / "other")
        self.gateway.context = keeping_in(self.gateway.context, first.context.store)
        self.gateway.engine.script = play(self.gateway.ids(TEXT))
        self.background = BackgroundResponses(self.gateway.context)

    @asynccontextmanager
    async def having_swept(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Run until the response has ended, and yield it."""
        self.background.start()
        kept = self.gateway.context.responses
        try:
            async with asyncio.timeout(60):
                while not (found := (await kept.find(name, ""))[1]).ended:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            yield json.loads(await kept.response(name, found))
        finally:
            await self.background.aclose()


async def test_one_that_was_to_be_cancelled_is_not_run_by_the_next_gateway(tmp_path: Path) -> None:
    first = make_gateway(tmp_path)
    half_said(first, 3)
    async with running(first):
        name = (await begin_stream(first, 6))["response"]["id"]
    await first.context.responses.cancel(name, "")
    other = Other(tmp_path, first)
    async with other.having_swept(name) as response:
        assert response["status"] == "cancelled"
        assert not other.gateway.engine.generations
        events = events_of(b"".join([one async for one in other.background.follow(name, "", 0)]).decode())
    assert events[-1]["response"] == response
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_one_that_finds_no_room_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_gateway(tmp_path)
    half_said(first, 3)
    async with running(first):
        names = [(await begin(first))["id"] for _ in range(2)]
    other, add = Other(tmp_path, first), BackgroundResponses._add

    def full(self: BackgroundResponses, job: Job, known: Any) -> Any:
        if job.id == names[0]:
            raise PagodaError(ErrorCode.OVERLOADED, "no memory")
        return add(self, job, known)

    monkeypatch.setattr(BackgroundResponses, "_add", full)
    async with other.having_swept(names[1]) as response:
        assert text_of(response) == TEXT
        assert await other.gateway.context.responses.claim(names[0], "whoever has room", 1.0)


async def test_one_whose_end_was_told_has_that_end(tmp_path: Path) -> None:
    """Its gateway died between writing the last event and the response."""
    first = make_gateway(tmp_path)
    told = await told_to_its_end(first)
    other = Other(tmp_path, first)
    async with other.having_swept(told["id"]) as response:
        assert response == told
        assert not other.gateway.engine.generations


async def told_to_its_end(first: Gateway) -> dict[str, Any]:
    half_said(first, 3)
    async with running(first):
        name = (await begin_stream(first, 6))["response"]["id"]
    kept = first.context.responses
    told, count = {"id": name, "status": "completed", "completed_at": 7, "output": []}, await kept.num_events(name)
    last = {"type": "response.completed", "sequence_number": count, "response": told}
    await kept.add_events(name, [event(last, last["type"])], count)
    return told


async def test_one_whose_end_finds_no_room_keeps_nobody_from_making_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_gateway(tmp_path)
    told, full = await told_to_its_end(first), Breaking(first.context.store)
    monkeypatch.setattr(times, "RESPONSE_LOOSE_S", 0.0)
    await full.append("loose", [b"x"])
    await first.context.responses._loose.enter("resp_1", ["loose"])
    full.break_at(1, How.FULL)
    first.context = keeping_in(first.context, cast(Store, full))
    other = Other(tmp_path, first)
    other.background.start()
    async with asyncio.timeout(60), aclosing(other.background):
        while await full.length("loose"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not (await first.context.responses.find(told["id"], ""))[1].ended


async def test_one_that_was_half_deleted_is_not_run_for_ever(tmp_path: Path) -> None:
    first = make_gateway(tmp_path)
    half_said(first, 3)
    async with running(first):
        name = (await begin_stream(first, 6))["response"]["id"]
    store, kept = first.context.store, first.context.responses
    await store.delete("responses", name)
    other = Other(tmp_path, first)
    other.background.start()
    try:
        async with asyncio.timeout(60):
            while [one async for one in kept.unfinished()]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await other.background.aclose()
    assert not other.gateway.engine.generations
    assert await kept.job(name) == b""
    assert await kept.num_events(name) == 0


class Held:
    """A store whose `put` of the ended response waits for `go`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ending = asyncio.Event()
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put(self, collection: str, key: str, value: bytes, **options: Any) -> int:
        if b'"ended"' in value:
            self.ending.set()
            await self.go.wait()
        return await self._store.put(collection, key, value, **options)


async def held_store(root: Path) -> tuple[Gateway, Held, BackgroundResponses, str]:
    """A running response that pauses before its end."""
    gateway = make_gateway(root)
    store = Held(gateway.context.store)
    gateway.context = keeping_in(gateway.context, cast(Store, store))
    background = BackgroundResponses(gateway.context)
    job = await responses_job(gateway.context, ResponsesRequest.model_validate(ASK), NOBODY)
    half_said(gateway, 2)
    await background.begin(job)
    await gateway.engine.submitted.wait()
    await gateway.engine.generations[0].waiting.wait()
    return gateway, store, background, job.id


async def test_its_end_is_not_disturbed_by_who_cancels_it_again(tmp_path: Path) -> None:
    gateway, store, background, name = await held_store(tmp_path)
    kept = gateway.context.responses
    await kept.cancel(name, "")
    cancels = [asyncio.create_task(background.cancelled(name))]
    await store.ending.wait()
    cancels.append(asyncio.create_task(background.cancelled(name)))
    await asyncio.sleep(0)
    store.go.set()
    await asyncio.gather(*cancels)
    _, found = await kept.find(name, "")
    assert found.ended
    assert json.loads(await kept.response(name, found))["status"] == "cancelled"
    await background.aclose()


async def test_one_that_is_marked_elsewhere_before_its_end_does_not_complete(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    async with running(gateway):
        go = half_said(gateway, 2)
        name = (await begin(gateway))["id"]
        await gateway.engine.submitted.wait()
        await gateway.context.responses.cancel(name, "")
        go.set()
        assert text_of(await until(gateway, name, "cancelled")) == TEXT


async def test_a_gateway_that_ends_says_so_to_those_who_follow(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    async with running(gateway):
        half_said(gateway, 3)
        name = (await begin_stream(gateway, 6))["response"]["id"]
        following = gateway.background.follow(name, "", 0)
        first = await anext(following)
    assert first.startswith(b"event: response.created")
    with pytest.raises(PagodaError) as caught:
        async for _ in following:
            pass
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_what_is_asked_of_a_gateway_that_ends_is_left_to_the_next(tmp_path: Path) -> None:
    first = make_gateway(tmp_path)
    async with running(first):
        pass
    name = (await begin(first))["id"]
    assert not first.engine.generations
    other = Other(tmp_path, first)
    async with other.having_swept(name) as response:
        assert text_of(response) == TEXT


async def test_a_fault_of_ours_ends_it_once(tmp_path: Path) -> None:
    async with running(make_gateway(tmp_path)) as gateway:
        gateway.engine.script = lambda record: [RuntimeError("as the test wants it")]
        answer = await until(gateway, (await begin(gateway))["id"], "failed")
        assert answer["error"]["code"] == "server_error"
        assert "as the test wants it" not in answer["error"]["message"]


@pytest.mark.parametrize("broken", ["its record", "its place in the list", "its job"])
async def test_one_that_cannot_be_read_is_in_nobodys_way(tmp_path: Path, broken: str) -> None:
    first = make_gateway(tmp_path)
    async with running(first):
        pass
    names = [(await begin(first))["id"] for _ in range(2)]
    store, name = first.context.store, names[0]
    if broken == "its record":
        await store.put(RESPONSES, name, b"{")
    elif broken == "its place in the list":
        await store.put(UNFINISHED, name, b"\xff")
    else:
        await store.drop(f"response/{name}/job")
        await store.append(f"response/{name}/job", [b"{"])
    other = Other(tmp_path, first)
    async with other.having_swept(names[1]) as response:
        assert text_of(response) == TEXT
    if broken == "its record":
        assert (await refusal(first, 503, "GET", f"/{name}"))["code"] == "unavailable"


async def test_a_key_whose_response_was_never_kept_may_be_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FlakyStore()
    append = store.append

    async def last_words(*args: Any, **kwargs: Any) -> int:
        store.gone = True
        return int(await append(*args, **kwargs))

    store.append = last_words
    gateway, headers = make_gateway(tmp_path, kept_in=cast(Store, store)), {"Idempotency-Key": "k"}
    gateway.engine.script = play(gateway.ids(TEXT))
    async with running(gateway):
        assert (await gateway.client.post(PATH, json=ASK, headers=headers)).status_code == 503
        store.append, store.gone = append, False
        begun = await gateway.client.post(PATH, json=ASK, headers=headers)
        assert (begun.status_code, begun.headers["x-should-retry"]) == (409, "true")
        monkeypatch.setattr(times, "TICKET_LEASE_S", 0.0)
        answers = [await gateway.client.post(PATH, json=ASK, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert text_of(await until(gateway, answers[0].json()["id"], "incomplete")) == TEXT
    await store.aclose()
