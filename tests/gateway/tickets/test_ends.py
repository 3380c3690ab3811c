"""What a client hears while nothing comes, and what is written when a run ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from tests.gateway.tickets.test_tickets import ASK, CHAT, TEXT, held_up, post, running, shared

from pagoda_gateway.store.interface import Conflict, Store
from pagoda_gateway.store.tickets import KeptTickets, Ticket


class HeldUp:
    """A store as a gateway has it that stands still before its so many-th call."""

    def __init__(self, store: Store, held_at: int) -> None:
        self._store = store
        self._left = held_at
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.log = ""

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.log = args[0] if name == "append" else self.log
            if self._left == 0:
                self.reached.set()
                await self.go.wait()
            self._left -= 1
            return await getattr(self._store, name)(*args, **kwargs)

        return call


async def test_openais_client_reads_on_behind_a_ping(tmp_path: Path) -> None:
    """Which it does not where a blank line follows the comment, because of the id before."""
    async with running(tmp_path, ping_interval_s=0.1) as gateway:
        go, pings = held_up(gateway), 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                nonlocal pings
                pings += message.get("body", b"").startswith(b": ping")
                if pings == 2:
                    go.set()
                await send(message)

            await gateway.app(scope, receive, sending)

        options: Any = {"max_retries": 0, "http_client": httpx.AsyncClient(transport=httpx.ASGITransport(app))}
        async with openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="x", **options) as client:
            stream = await client.chat.completions.create(**ASK, extra_headers={"Idempotency-Key": "k"})
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
        assert pings >= 2


async def test_the_answer_is_that_of_the_gateway_whose_the_ticket_is_in_whatever_order_others_write() -> None:
    """One that ran it with other weights stands still before any of its calls, until the other has come to its end."""
    for held_at in range(3):
        async with shared() as store:
            slow = HeldUp(store, held_at)
            theirs, ours = KeptTickets(cast(Store, slow), 60.0), KeptTickets(store, 60.0)
            ticket = Ticket(digest="d", path=CHAT, job_id="j", num_bytes=0, stream=True, runner="first")
            begun = await ours.begin("n", "", ticket, b"job")
            keeping = asyncio.create_task(theirs.keep_answer(begun, b"of other weights"))
            await slow.reached.wait()
            assert await ours.keep_answer(await ours.change(begun, runner="second"), b"tokens")
            slow.go.set()
            with pytest.raises(Conflict):
                await keeping
            found = await ours.find("n", "")
            assert found is not None
            assert await ours.answer(found) == b"tokens"
            assert await store.length(slow.log) == 0


async def test_a_gateway_that_closes_waits_for_what_is_still_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go, whole = asyncio.Event(), asyncio.Event(), KeptTickets.release

    async def release(kept: KeptTickets, name: str, holder: str) -> None:
        asked.set()
        await go.wait()
        await whole(kept, name, holder)

    monkeypatch.setattr(KeptTickets, "release", release)
    async with running(tmp_path) as gateway:
        await post(gateway, ASK)
        await asked.wait()
        closing = asyncio.create_task(gateway.tickets.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        go.set()
        await closing
