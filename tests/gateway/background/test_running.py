"""What a background response writes takes store room; without room it fails, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.background.test_runner import ASK, Other, half_said, keeping_in, running, text_of
from tests.gateway.fakes_engine import Batch, Gateway, make_gateway, play
from tests.gateway.responses import events_of
from tests.gateway.store.breaking_store import Interleaved

from pagoda_gateway.api.responses_schemas import ResponsesRequest
from pagoda_gateway.background.runner import BackgroundResponses
from pagoda_gateway.clients import NOBODY
from pagoda_gateway.dialects.responses import responses_job
from pagoda_gateway.store import response_logs
from pagoda_gateway.store.response_logs import EVENTS, LARGE, log_of
from pagoda_gateway.store.responses import KeptResponses
from pagoda_gateway.store.room import Held
from pagoda_proto import times
from pagoda_proto.records import RequestRecord

LONG = "one two three four " * 2


def bounded(root: Path, num_bytes: int = 9000) -> Gateway:
    """A gateway with room for the start of a response and some events."""
    gateway = make_gateway(root)
    gateway.engine.script = play(gateway.ids(LONG))
    store = gateway.context.store
    gateway.context = replace(gateway.context, responses=KeptResponses(store, 3600.0, Held(100, num_bytes)))
    gateway.background = BackgroundResponses(gateway.context)
    return gateway


async def begun(gateway: Gateway, *, stream: bool) -> str:
    body = ResponsesRequest.model_validate(ASK | {"stream": stream})
    job = await responses_job(gateway.context, body, NOBODY)
    await gateway.background.begin(job)
    return job.id


async def told(gateway: Gateway, name: str, go: asyncio.Event) -> list[dict[str, Any]]:
    """Follow a response; set `go` at the first text."""
    events: list[bytes] = []
    async with asyncio.timeout(60):
        async for one in gateway.background.follow(name, "", 0):
            events.append(one)
            if b".delta" in one:
                go.set()
    return events_of(b"".join(events).decode())


@pytest.mark.parametrize(("ends", "num_bytes"), [(False, 9000), (True, 12_000)])
async def test_one_that_finds_no_room_fails_and_who_follows_it_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, num_bytes: int
) -> None:
    """Whether it has already ended when it is written, or still runs."""
    gateway, go = bounded(tmp_path, num_bytes), asyncio.Event()
    monkeypatch.setattr(times, "RESPONSE_WRITE_S", 0.0)
    whole = gateway.engine.script

    def script(record: RequestRecord) -> list[Batch]:
        batches = list(whole(record))
        return [*batches[:10], go, *(batches[10:] if ends else [*batches[10:-1], asyncio.Event()])]

    gateway.engine.script = script
    async with running(gateway):
        name = await begun(gateway, stream=True)
        events = await told(gateway, name, go)
        await gateway.engine.generations[0].closed.wait()
        await assert_failed(gateway, name, events)
    text = text_of(events[-1]["response"])
    assert text == LONG if ends else LONG.startswith(text) and len(text) > len(LONG) // 2


async def assert_failed(gateway: Gateway, name: str, events: list[dict[str, Any]]) -> None:
    kept, last = gateway.context.responses, events[-1]["response"]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert [one["type"] for one in events if "response" in one][2:] == ["response.in_progress", "response.failed"]
    assert any("delta" in one for one in events)
    assert last["error"]["code"] == "rate_limit_exceeded"
    assert "are kept for a key at most" in last["error"]["message"]
    assert (last["incomplete_details"], last.get("completed_at")) == (None, None)
    assert text_of(last).startswith("".join(one["delta"] for one in events if "delta" in one))
    stored = events_of(b"".join([one async for one in kept.events(name)]).decode())
    assert stored[:-1] == events[:-1]
    assert stored[-1] == events[-1] | {"response": last | {"output": []}}
    _, found = await kept.find(name, "")
    assert found.ended
    assert (await kept.held_by("")).num_bytes < 12_000
    assert not [one async for one in kept.unfinished()]
    await kept.finished(f"resp_{1:032x}", "somebody else", b"[]", b"x" * 5000)


async def test_one_whose_object_finds_no_room_says_so(tmp_path: Path) -> None:
    gateway = bounded(tmp_path)
    gateway.engine.script = play(gateway.ids(LONG * 300))
    kept = gateway.context.responses
    async with running(gateway):
        name = await begun(gateway, stream=False)
        async with asyncio.timeout(60):
            while not (found := (await kept.find(name, ""))[1]).ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    response = await kept.response(name, found)
    assert b'"status":"failed"' in response
    assert b'"output":[]' in response


async def test_what_is_left_of_one_that_was_deleted_elsewhere_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "RESPONSE_LEASE_S", 0.1)
    gateway = make_gateway(tmp_path)
    half_said(gateway, 2)
    kept, store = gateway.context.responses, gateway.context.store
    async with running(gateway):
        name = await begun(gateway, stream=True)
        await gateway.engine.submitted.wait()
        other = keeping_in(gateway.context, store).responses
        await other.delete(name, "")
        async with asyncio.timeout(60):
            await gateway.engine.generations[0].closed.wait()
            while gateway.background.snapshot(name) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert await kept.num_events(name) == 0


async def test_what_was_laid_aside_of_one_that_is_deleted_elsewhere_just_then_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "RESPONSE_WRITE_S", 0.0)
    gateway = make_gateway(tmp_path)
    go, store, names, whole = asyncio.Event(), gateway.context.store, list[str](), play(gateway.ids(LONG))
    other = keeping_in(gateway.context, store).responses

    def script(record: RequestRecord) -> list[Batch]:
        batches = list(whole(record))
        return [*batches[:3], go, *batches[3:-1], asyncio.Event()]

    async def delete() -> None:
        await other.delete(names[0], "")

    gateway.engine.script = script

    async with running(gateway):
        names.append(await begun(gateway, stream=True))
        large, following = log_of(names[0], LARGE), gateway.background.follow(names[0], "", 0)
        async for one in following:
            if b".delta" in one:
                break
        interleaved = Interleaved(store, "append", large, delete)
        monkeypatch.setattr(gateway.context.responses._logs, "_store", interleaved)
        monkeypatch.setattr(response_logs, "MAX_PART_BYTES", 1)
        go.set()
        async with asyncio.timeout(60):
            while gateway.background.snapshot(names[0]) is not None or await store.length(large):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert interleaved.logs == {large, log_of(names[0], EVENTS)}


async def test_one_that_is_cancelled_before_its_first_step_ends(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    half_said(gateway, 2)
    async with running(gateway):
        name = await begun(gateway, stream=False)
        async with asyncio.timeout(60):
            await gateway.background.cancelled(name)
        assert gateway.background.snapshot(name) is None
    kept = gateway.context.responses
    _, found = await kept.find(name, "")
    assert b'"status":"cancelled"' in await kept.response(name, found)


async def test_one_that_another_gateway_goes_on_with_takes_room_there(tmp_path: Path) -> None:
    first = make_gateway(tmp_path)
    half_said(first, 3)
    async with running(first):
        name = await begun(first, stream=True)
        await first.engine.submitted.wait()
    other = Other(tmp_path, first)
    async with other.having_swept(name) as response:
        assert response["status"] == "incomplete"
        kept = other.gateway.context.responses
        _, found = await kept.find(name, "")
        assert found.reserved == 0
        assert found.num_bytes > len(b"".join([one async for one in kept.events(name)]))
