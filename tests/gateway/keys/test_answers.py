"""Whoever holds a good key is let in, however many others ask for keys that nobody made."""

from __future__ import annotations

import asyncio

import pytest

from pagoda_gateway.keys.answers import MOST_ASKING, Answers
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError


async def test_strangers_keep_nobody_in_who_was_turned_out() -> None:
    now, state, slow = 0.0, "active", asyncio.Event()

    async def ask(name: str) -> str | None:
        if name != "mine":
            await slow.wait()
        return state if name == "mine" else None

    answers = Answers(ask, lambda: now)
    assert await answers.of("mine") == "active"
    strangers = [asyncio.create_task(answers.of(f"made up {i}")) for i in range(MOST_ASKING)]
    await asyncio.sleep(0)
    state = "revoked"
    for now in (times.KEY_FRESH_S, times.KEY_FRESH_S + times.KEY_STALE_S):  # noqa: B007 - what the clock says
        assert await answers.of("mine") == "revoked"
    slow.set()
    await asyncio.gather(*strangers)
    await answers.aclose()


async def test_strangers_turn_nobody_away_who_is_known() -> None:
    now, slow = 0.0, asyncio.Event()

    async def ask(name: str) -> str | None:
        if name != "good":
            await slow.wait()
        return name if name == "good" else None

    answers = Answers(ask, lambda: now)
    assert await answers.of("good") == "good"
    strangers = [asyncio.create_task(answers.of(f"made up {i}")) for i in range(MOST_ASKING)]
    await asyncio.sleep(0)
    now = times.KEY_FRESH_S + 1
    assert await answers.of("good") == "good"
    with pytest.raises(PagodaError) as caught:
        await answers.of("one more")
    assert caught.value.code is ErrorCode.OVERLOADED
    slow.set()
    assert await asyncio.gather(*strangers) == [None] * MOST_ASKING
    now += times.KEY_STALE_S
    assert await answers.of("good") == "good", "asked about again"
    await answers.aclose()
