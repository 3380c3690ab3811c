"""The guarantees of a store, on both back ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from tests.gateway.store.breaking_store import Interleaved
from tests.gateway.store.redis_server import running_redis

from pagoda_gateway.store.interface import (
    ABSENT,
    MAX_APPEND_BYTES,
    MAX_NAME_CHARS,
    MAX_PAGE_BYTES,
    MAX_PAGE_RECORDS,
    MAX_PART_BYTES,
    MAX_VALUE_BYTES,
    Conflict,
    Store,
    parts_of,
    read_whole,
)
from pagoda_gateway.store.opening import open_store

_names = itertools.count()
SOON_S, LONG_S = 0.05, 3600.0


@pytest_asyncio.fixture(params=["memory", "sqlite", "scratch", "redis"], scope="module", loop_scope="module")
async def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Store]:
    if request.param == "redis":
        async with running_redis() as server:
            opened = open_store(server.address)
            yield opened
            await opened.aclose()
        return
    path: Path = tmp_path_factory.mktemp("store") / "new" / "s.db"
    opened = open_store("" if request.param == "memory" else f"{request.param}://{path}")
    yield opened
    await opened.aclose()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def empty(store: Store, log: str) -> bool:
    return await store.length(log) == 0


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"n{next(_names)}"


async def eventually(question: Callable[[], Awaitable[bool]]) -> None:
    while not await question():  # noqa: ASYNC110 - time passes by the store's own clock
        await asyncio.sleep(SOON_S)


async def gone(store: Store, name: str) -> bool:
    return await store.get("things", name) is None


async def test_what_was_put_is_there_with_owner_and_version(store: Store, name: str) -> None:
    assert await store.get("things", name) is None
    version = await store.put("things", name, b"\x00\xff", owner="me")
    found = await store.get("things", name)
    assert found is not None
    assert (found.key, found.owner, found.value, found.version) == (name, "me", b"\x00\xff", version)
    assert found.expires_at is None
    assert await store.get("others", name) is None


async def test_a_write_that_has_not_seen_the_last_is_a_conflict(store: Store, name: str) -> None:
    first = await store.put("things", name, b"1", expect=ABSENT)
    with pytest.raises(Conflict):
        await store.put("things", name, b"2", expect=ABSENT)
    second = await store.put("things", name, b"2", expect=first)
    assert second > first > ABSENT
    for stale in (first, second + 1):
        with pytest.raises(Conflict):
            await store.put("things", name, b"3", expect=stale)
        with pytest.raises(Conflict):
            await store.delete("things", name, expect=stale)
    found = await store.get("things", name)
    assert found is not None
    assert found.value == b"2"
    third = await store.put("things", name, b"4")
    assert third > second
    assert await store.delete("things", name, expect=third)
    assert not await store.delete("things", name)


async def test_a_version_never_comes_again(store: Store, name: str) -> None:
    first = await store.put("things", name, b"1")
    await store.delete("things", name)
    assert await store.put("things", name, b"1") > first
    with pytest.raises(Conflict):
        await store.put("things", name, b"2", expect=first)


async def test_of_many_who_write_at_once_one_wins(store: Store, name: str) -> None:
    writes = (store.put("things", name, b"%d" % i, expect=ABSENT) for i in range(8))
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 7


async def test_what_has_expired_is_nowhere(store: Store, name: str) -> None:
    soon, late = time.time() + SOON_S, time.time() + LONG_S
    await store.put("things", name, b"1", owner=name, expires_at=soon)
    await store.put("things", f"{name}kept", b"2", owner=name, expires_at=soon)
    await store.put("things", f"{name}kept", b"2", owner=name, expires_at=None)
    await store.put("things", f"{name}late", b"3", owner=name, expires_at=late)
    await eventually(lambda: gone(store, name))
    page = await store.page("things", name, limit=10, newest_first=False)
    assert [(r.key, r.expires_at and round(r.expires_at)) for r in page.records] == [
        (f"{name}kept", None),
        (f"{name}late", round(late)),
    ]
    assert not page.more
    assert not await store.delete("things", name)
    await store.put("things", name, b"anew", expect=ABSENT, owner=name)
    page = await store.page("things", name, limit=1)
    assert [record.key for record in page.records] == [name]


async def test_listing_goes_by_owner_in_the_order_of_first_puts(store: Store, name: str) -> None:
    for i in range(5):
        await store.put("things", f"{name}.{i}", b"%d" % i, owner=name)
        await store.put("things", f"{name}.{i}.not", b"", owner=f"{name}not")
        await store.put("otherwise", f"{name}.{i}", b"", owner=name)
    await store.put("things", f"{name}.1", b"again", owner=name)
    page = await store.page("things", name, limit=2)
    assert [record.key for record in page.records] == [f"{name}.4", f"{name}.3"]
    assert page.more
    rest = await store.page("things", name, limit=3, after=page.records[-1].position)
    assert [record.key for record in rest.records] == [f"{name}.2", f"{name}.1", f"{name}.0"]
    assert not rest.more
    assert rest.records[1].value == b"again"
    oldest = await store.page("things", name, limit=4, after=rest.records[-1].position, newest_first=False)
    assert [record.key for record in oldest.records] == [f"{name}.{i}" for i in range(1, 5)]
    await store.delete("things", f"{name}.3")
    after_gone = await store.page("things", name, limit=1, after=page.records[-1].position)
    assert [record.key for record in after_gone.records] == [f"{name}.2"]
    assert not (await store.page("things", f"{name}none", limit=1)).records


async def test_many_records_are_listed_page_by_page(store: Store, name: str) -> None:
    keys = [f"{name}.{i}" for i in range(70)]
    for key in keys:
        await store.put("things", key, b"v", owner=name)
    page = await store.page("things", name, limit=MAX_PAGE_RECORDS, newest_first=False)
    assert [record.key for record in page.records] == keys
    assert not page.more


async def test_a_page_is_bounded_in_bytes(store: Store, name: str) -> None:
    for i in range(3):
        await store.put("things", f"{name}.{i}", bytes(MAX_PAGE_BYTES // 2), owner=name)
    page = await store.page("things", name, limit=10)
    assert len(page.records) == 2
    assert page.more
    await store.append(name, [bytes(MAX_PART_BYTES), b"1", b"2"])
    assert [len(part) for part in await store.read(name)] == [MAX_PART_BYTES]
    assert await store.read(name, 1) == [b"1", b"2"]


async def test_a_log_grows_at_its_end(store: Store, name: str) -> None:
    assert await store.length(name) == 0
    assert await store.read(name) == []
    assert await store.append(name, [b"a", b""]) == 2
    assert await store.append(name, [b"c"], index=2) == 3
    for index in (0, 2, 4):
        with pytest.raises(Conflict):
            await store.append(name, [b"x"], index=index)
    assert await store.length(name) == 3
    assert await store.read(name) == [b"a", b"", b"c"]
    assert await store.read(name, 2) == [b"c"]
    assert await store.read(name, 3) == []
    await store.drop(name)
    await store.drop(name)
    assert await store.length(name) == 0
    assert await store.append(name, [b"new"], index=0) == 1
    assert await store.read(name) == [b"new"]


async def test_a_log_vanishes_when_it_was_said_to(store: Store, name: str) -> None:
    await store.keep_until(name, time.time() + SOON_S)  # there is no such log: nothing happens
    for soon_s in (SOON_S, 1.0, 20.0):  # longer if the machine was too busy to revoke it in time
        stays, until = f"{name}stays{soon_s}", time.time() + soon_s
        await store.append(stays, [b"old", b"old"])
        await store.keep_until(stays, until)
        await store.keep_until(stays, None)
        if time.time() < until:
            break
    await store.append(f"{name}soon", [b"old", b"old"])
    await store.keep_until(f"{name}soon", time.time() + SOON_S)
    await eventually(lambda: empty(store, f"{name}soon"))
    assert await store.read(f"{name}soon") == []
    assert await store.append(f"{name}soon", [b"new"], index=0) == 1
    assert await store.read(f"{name}soon") == [b"new"]
    await asyncio.sleep(max(0.0, until - time.time()))
    assert await store.length(stays) == 2


async def test_a_log_that_vanishes_while_it_is_read_is_not_read_in_part(store: Store, name: str) -> None:
    data = b"x" * 3 * MAX_PAGE_BYTES
    await store.append(name, parts_of(data))
    assert await read_whole(store, name) == data
    assert await read_whole(Interleaved(store, "read", name, lambda: store.drop(name)), name) == b""
    assert await read_whole(store, name) == b""


async def test_what_is_appended_may_say_when_the_log_vanishes(store: Store, name: str) -> None:
    await store.append(name, [b"old"], index=0, expires_at=time.time() + LONG_S)
    await store.append(name, [b"more"], index=1, expires_at=time.time() + SOON_S)
    await eventually(lambda: empty(store, name))
    assert await store.append(name, [b"new"], index=0) == 1, "which stays, as nothing was said of it"
    await asyncio.sleep(2 * SOON_S)
    assert await store.append(name, [b"more"]) == 2


async def test_who_appends_and_says_nothing_of_when_it_vanishes_leaves_that_as_it_was(store: Store, name: str) -> None:
    await store.append(name, [b"old"], index=0, expires_at=time.time() + SOON_S)
    with suppress(Conflict):  # it may have expired already
        await store.append(name, [b"more"], index=1)
    await eventually(lambda: empty(store, name))


async def test_a_claim_has_one_holder_until_its_lease_is_over(store: Store, name: str) -> None:
    assert await store.claim(name, "a", LONG_S)
    assert not await store.claim(name, "b", LONG_S)
    assert await store.claim(name, "a", LONG_S)
    await store.release(name, "b")
    assert not await store.claim(name, "b", LONG_S)
    await store.release(name, "a")
    assert await store.claim(name, "b", SOON_S)
    await eventually(lambda: store.claim(name, "c", LONG_S))
    assert not await store.claim(name, "b", LONG_S)


@pytest.mark.parametrize(
    "odd", ["'; DROP TABLE records; --", '"', "*", "?[a-z]", "{a}:b", ":now", "é", "a b", "%s", "\\"]
)
async def test_sec_23_names_are_never_code(store: Store, name: str, odd: str) -> None:
    key = f"{name}{odd}"
    await store.put("things", name, b"kept", owner=name)
    await store.put("things", key, b"odd", owner=key)
    page = await store.page("things", key, limit=10)
    assert [(record.key, record.owner, record.value) for record in page.records] == [(key, key, b"odd")]
    assert await store.append(key, [b"p"]) == 1
    assert await store.read(key) == [b"p"]
    assert await store.claim(key, odd, LONG_S)
    assert await store.delete("things", key)
    kept = await store.get("things", name)
    assert kept is not None
    assert kept.value == b"kept"


async def test_limits_are_met_before_the_store_is(store: Store, name: str) -> None:
    await store.put("things", name, bytes(MAX_VALUE_BYTES))
    await store.append(name, [bytes(MAX_PART_BYTES)] * (MAX_APPEND_BYTES // MAX_PART_BYTES))
    await store.drop(name)
    refused = [
        store.put("things", name, bytes(MAX_VALUE_BYTES + 1)),
        store.put("things", "k" * (MAX_NAME_CHARS + 1), b""),
        store.put("things", "two\nlines", b""),
        store.put("no such:thing", name, b""),
        store.get("", name),
        store.append(name, []),
        store.append(name, [bytes(MAX_PART_BYTES + 1)]),
        store.append(name, [bytes(MAX_PART_BYTES)] * (MAX_APPEND_BYTES // MAX_PART_BYTES) + [b"1"]),
        store.page("things", "", limit=0),
        store.page("things", "", limit=MAX_PAGE_RECORDS + 1),
    ]
    for call in refused:
        with pytest.raises(ValueError):
            await call
    assert await store.length(name) == 0


async def test_who_reads_far_beyond_the_end_finds_nothing(store: Store, name: str) -> None:
    await store.append(name, [b"one"])
    for start in (1, 2**40, 10**30):
        assert await store.read(name, start) == []
