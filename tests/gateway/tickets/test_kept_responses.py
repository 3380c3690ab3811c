"""Responses with an Idempotency-Key: their end is kept once, and nothing is kept if they were deleted."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from tests.gateway.fakes_engine import MODEL, Gateway, held_up
from tests.gateway.store.breaking_store import Breaking, How
from tests.gateway.tickets.test_tickets import RESPONSES, post, running

from pagoda_gateway.store.interface import Store
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore
from pagoda_proto import times

ASK: dict[str, Any] = {"model": MODEL, "input": "hi", "stream": True}


def responses_in(stream: str) -> list[dict[str, Any]]:
    """The response as sent in each event, in order."""
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]
    return [event["response"] for event in events if "response" in event]


async def test_a_reader_whose_time_is_over_is_told_so_and_what_is_kept_is_the_end(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        go = held_up(gateway, num_batches=2)
        key, last = await _late(gateway)
        assert (last["status"], last["store"]) == ("failed", False)
        assert (await gateway.client.get(f"{RESPONSES}/{last['id']}")).status_code == 404
        go.set()
        whole = responses_in((await post(gateway, ASK, key)).text)[-1]
        assert (whole["id"], whole["status"], whole["store"]) == (last["id"], "incomplete", True)
        assert (await gateway.client.get(f"{RESPONSES}/{last['id']}")).json() == whole


async def _late(gateway: Gateway) -> tuple[str, dict[str, Any]]:
    """The key of a reader that timed out after its response had begun, and the last version of the response it got."""
    for time_ms in ("50", "500", "5000", "30000"):
        headers = {"Idempotency-Key": time_ms, "Request-Timeout-Ms": time_ms}
        late = await gateway.client.post(RESPONSES, json=ASK, headers=headers)
        if told := responses_in(late.text):
            return time_ms, told[-1]
    raise AssertionError(late.text)


class Slow:
    """A client that reads nothing after the first event until `go`."""

    def __init__(self, gateway: Gateway) -> None:
        self.go, self.has_begun = asyncio.Event(), asyncio.Event()
        self.received: list[bytes] = []
        self._gateway = gateway
        self._asked = False

    async def read(self) -> str:
        headers = {"host": "gateway", "content-type": "application/json", "idempotency-key": "k"}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": RESPONSES,
            "raw_path": RESPONSES.encode(),
            "query_string": b"",
            "scheme": "http",
            "root_path": "",
            "server": ("gateway", 80),
            "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await self._gateway.app(scope, self._receive, self._send)
        return b"".join(self.received).decode()

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            body = json.dumps(ASK, separators=(",", ":"), ensure_ascii=False).encode()
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.received.append(message.get("body", b""))
            self.has_begun.set()
            await self.go.wait()


async def test_one_that_is_deleted_is_not_kept_by_a_reader_who_comes_to_its_end_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "RESPONSE_LOOSE_S", 0.0)  # as if long after
    async with running(tmp_path) as gateway:
        path = f"{RESPONSES}/{responses_in((await post(gateway, ASK)).text)[-1]['id']}"
        slow = Slow(gateway)
        reading = asyncio.create_task(slow.read())
        await slow.has_begun.wait()
        assert (await gateway.client.delete(path)).status_code == 200
        slow.go.set()
        last = responses_in(await reading)[-1]
        assert (last["status"], last["store"]) == ("incomplete", False)
        assert (await gateway.client.get(path)).status_code == 404


@pytest.mark.parametrize("how", [How.CANCELLED, How.FULL_ONCE, How.LOST, How.TWO_LOST])
async def test_whenever_its_beginning_breaks_off_a_key_stands_for_one_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    """A background response, with a client that retries until it gets an answer."""
    monkeypatch.setattr(times, "TICKET_LEASE_S", 0.0)
    monkeypatch.setattr(times, "RESPONSE_SWEEP_S", 0.01)
    ask = {"model": MODEL, "input": "hi", "background": True}
    for number in itertools.count(1):
        store = Breaking(SqliteStore(MEMORY))
        async with running(tmp_path / str(number), kept_in=cast(Store, store)) as gateway:
            said, broken = await store.during(post(gateway, ask), number, how)
            gateway.background.start()
            again = await post(gateway, ask)
            assert again.status_code == 200, again.text
            async with asyncio.timeout(60):
                while [one async for one in gateway.context.responses.unfinished()]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            told = (await gateway.client.get(f"{RESPONSES}/{again.json()['id']}")).json()
            assert told["status"] == "incomplete"
            without_ticket = isinstance(said, httpx.Response) and "idempotency-status" in said.headers
            assert (await gateway.context.responses.held_by("")).number in (1, 1 + without_ticket)
            await gateway.background.aclose()
        await store.aclose()
        if not broken:
            assert number > 8
            return
