"""Keys in either kind of store: two writers see each other's keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.gateway.store.redis_server import running_redis

from pagoda_gateway.keys.api_key import NewKey
from pagoda_gateway.keys.grants import Limits, Role
from pagoda_gateway.keys.register import KeyRegister
from pagoda_gateway.store.opening import open_store
from pagoda_proto.errors import ErrorCode, PagodaError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(params=["file", "redis"], scope="module", loop_scope="module")
async def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    if request.param == "file":
        path: Path = tmp_path_factory.mktemp("keys") / "s.db"
        yield f"sqlite://{path}"
        return
    async with running_redis() as server:
        yield server.address


async def test_what_one_makes_the_other_finds_lists_and_revokes(address: str) -> None:
    stores = [open_store(address) for _ in range(2)]
    try:
        here, there = map(KeyRegister, stores)
        assert not await there.any()
        asked = NewKey(name="Ann's", role=Role.ADMIN, models=("a", "b"), limits=Limits(tokens_per_minute=5))
        key, text = await here.create(asked)
        assert await there.any()
        assert await there.find(key.id) == await there.get(key.id) == key
        assert text not in str(key)
        others = [(await here.create(NewKey(name=f"n{i}")))[0] for i in range(4)]
        newest = await there.page(limit=3)
        assert ([one.id for one in newest.keys], newest.more) == ([one.id for one in reversed(others[1:])], True)
        rest = await there.page(limit=3, after=newest.keys[-1].id)
        assert ([one.id for one in rest.keys], rest.more) == ([others[0].id, key.id], False)
        oldest = await there.page(limit=1, newest_first=False)
        assert oldest.keys == [key]
        revoked = await asyncio.gather(*(register.revoke(key.id) for register in (here, there, here)))
        assert len({one.revoked_at for one in revoked}) == 1
        assert revoked[0].revoked_at is not None
        assert await here.find(key.id) == revoked[0]
        for unknown in ("key_0123456789abcdef", "key_", "", "x' OR 1=1", "key_*"):
            for ask in (there.get, there.revoke):
                with pytest.raises(PagodaError) as caught:
                    await ask(unknown)
                assert caught.value.code is ErrorCode.NOT_FOUND
    finally:
        for store in stores:
            await store.aclose()
