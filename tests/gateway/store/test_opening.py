"""An address selects a store, or is refused with a message that does not repeat it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.store.opening import open_store, store_problem
from pagoda_gateway.store.redis_store import RedisStore
from pagoda_gateway.store.sqlite_store import SqliteStore


@pytest.mark.parametrize(
    "address",
    [
        "redis://",
        "redis://h:port",
        "http://h",
        "sqlite://",
        "scratch://",
        "/a/path",
        "redis:/h:1",
        "rediss://:secret@:1",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    assert store_problem(address)
    with pytest.raises(ValueError, match="store must be empty") as caught:
        open_store(address)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="store must be empty"):
        GatewayConfig(store=address)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("", SqliteStore),
        (":memory:", SqliteStore),
        ("sqlite://relative.db", SqliteStore),
        ("scratch:///a/path", SqliteStore),
        ("redis://:secret@example:1/2", RedisStore),
        ("rediss://user:secret@[::1]:6379", RedisStore),
        ("unix:///run/valkey.sock?db=1", RedisStore),
    ],
)
async def test_an_address_says_which(address: str, kind: type) -> None:
    assert GatewayConfig(store=address).store == address
    store = open_store(address)
    assert isinstance(store, kind)
    await store.aclose()


async def test_the_path_is_all_that_follows(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path}/a/b.db")
    await store.append("n", [b"."])
    assert (tmp_path / "a" / "b.db").exists()
    await store.aclose()
