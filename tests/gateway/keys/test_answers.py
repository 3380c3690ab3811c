"""A valid key works, however many clients ask for keys that do not exist."""

from __future__ import annotations

import asyncio

import pytest

from pagoda_gateway.keys.answers import MOST_ASKING, Answers
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError


class Besieged:
    """Answers backed by a store that knows `mine` at once but answers for made-up keys only when let; as many clients
    as allowed are asking for those."""

    def __init__(self) -> None:
        self.now = 0.0
        self.state = "active"
        self.answers = Answers(self._ask, lambda: self.now)
        self._let = asyncio.Event()
        self._strangers: list[asyncio.Task[str | None]] = []

    async def _ask(self, name: str) -> str | None:
        if name == "mine":
            return self.state
        await self._let.wait()
        return None

    async def __aenter__(self) -> Besieged:
        assert await self.answers.of("mine") == "active"
        self._strangers = [asyncio.create_task(self.answers.of(f"made up {i}")) for i in range(MOST_ASKING)]
        await asyncio.sleep(0)
        return self

    async def relieve(self) -> None:
        self._let.set()
        assert await asyncio.gather(*self._strangers) == [None] * MOST_ASKING

    async def __aexit__(self, *_: object) -> None:
        await self.relieve()
        await self.answers.aclose()


async def test_strangers_keep_nobody_in_who_was_turned_out() -> None:
    async with Besieged() as one:
        one.state = "revoked"
        for one.now in (times.KEY_FRESH_S, times.KEY_FRESH_S + times.KEY_STALE_S):
            assert await one.answers.of("mine") == "revoked"


async def test_strangers_turn_nobody_away_who_is_known() -> None:
    async with Besieged() as one:
        one.now = times.KEY_FRESH_S + 1
        assert await one.answers.of("mine") == "active"
        with pytest.raises(PagodaError) as caught:
            await one.answers.of("one more")
        assert caught.value.code is ErrorCode.OVERLOADED
        await one.relieve()
        one.now += times.KEY_STALE_S
        assert await one.answers.of("mine") == "active", "asked about again"
