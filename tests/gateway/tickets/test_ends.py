"""What a client receives while nothing comes, and what is written when a run ends."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from tests.gateway.fakes_engine import MODEL, failing, held_up
from tests.gateway.store.test_room import Watched
from tests.gateway.tickets.test_tickets import ASK, RESPONSES, TEXT, WHOLE, left, post, running, shared

from pagoda_gateway.catalogue import Catalogue
from pagoda_gateway.store.tickets import KeptTickets
from pagoda_proto.errors import ErrorCode, PagodaError


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_is_deleted_is_not_told_again_under_its_key(tmp_path: Path, background: bool) -> None:
    """And its ticket is found without scanning all tickets."""
    ask = {"model": MODEL, "input": "hi", "background": background}
    async with shared() as raw:
        store: Any = Watched(raw)
        async with running(tmp_path, kept_in=store) as gateway, aclosing(gateway.background):
            first = (await post(gateway, ask)).json()
            assert (await post(gateway, ask)).json()["id"] == first["id"]
            path = f"{RESPONSES}/{first['id']}"
            store.calls.clear()
            assert (await gateway.client.delete(path)).status_code == 200
            assert "page" not in store.calls
            again = await post(gateway, ask)
            assert "idempotent-replayed" not in again.headers
            assert again.json()["id"] != first["id"]
            assert (await gateway.client.get(path)).status_code == 404


@pytest.mark.parametrize("end", ["deleted", "refused"])
async def test_what_is_gone_takes_no_room_and_nobody_counts_for_it(tmp_path: Path, end: str) -> None:
    async with shared() as raw:
        store: Any = Watched(raw)
        async with running(tmp_path, kept_in=store, max_tickets=2) as gateway:
            await post(gateway, WHOLE, "kept")
            if end == "refused":
                gateway.engine.script = failing(ErrorCode.INVALID_ARGUMENT)
            for i in range(4):
                response = await post(gateway, ASK, f"k{i}")
                if end == "deleted":
                    assert (await gateway.client.delete(response.headers["content-location"])).status_code == 200
                while gateway.tickets._live:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert store.calls["page"] == 1


async def test_openais_client_reads_on_behind_a_ping(tmp_path: Path) -> None:
    """It would not if a blank line followed the comment, because of the id before it."""
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


async def test_one_that_is_left_before_its_first_step_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is no longer served, and nobody waits for it."""
    async with running(tmp_path, ticket_grace_s=0.0) as gateway:
        held_up(gateway)
        await left(gateway, ASK)
        absent = PagodaError(ErrorCode.MODEL_NOT_FOUND, "as the test wants it")
        monkeypatch.setattr(Catalogue, "of_job", Mock(side_effect=absent))
        assert (await post(gateway, ASK)).status_code == 404
        async with asyncio.timeout(60):
            while gateway.tickets._live:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
