"""An address becomes a store. Nothing is connected yet: a store that is gone is no reason not to serve."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from pagoda_gateway.store.interface import Store
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore

SQLITE, SCRATCH = "sqlite://", "scratch://"
SHARED = ("redis", "rediss", "unix")


def store_problem(address: str) -> str:
    """What is wrong with an address, "" if nothing is. An address may hold a password, which is not repeated."""
    if address in ("", MEMORY) or _path(address):
        return ""
    try:
        parts = urlsplit(address)
        place = parts.path if parts.scheme == "unix" else parts.hostname
        known = parts.scheme in SHARED and place and (parts.port or 1)
    except ValueError:
        known = False
    return (
        ""
        if known
        else "must be empty, sqlite://PATH, scratch://PATH, redis://HOST:PORT, rediss://HOST:PORT or unix://PATH"
    )


def is_lasting(address: str) -> bool:
    """Whether what is kept there outlives the processes that began it."""
    return address not in ("", MEMORY) and not address.startswith(SCRATCH)


def open_store(address: str) -> Store:
    """A store in memory for "". The path of sqlite:///path is absolute; scratch:///path is bounded and lasts less.

    Raises:
        ValueError: the address cannot be used, or what is needed for it is not installed.
    """
    if problem := store_problem(address):
        raise ValueError(f"store {problem}")
    if address in ("", MEMORY):
        return SqliteStore(MEMORY)
    if path := _path(address):
        return SqliteStore(path, scratch=address.startswith(SCRATCH))
    try:
        from pagoda_gateway.store.redis_store import RedisStore
    except ImportError as error:
        raise ValueError("store: Redis and Valkey need redis-py: pip install 'pagoda-serve[redis]'") from error
    return RedisStore(address)


def _path(address: str) -> str:
    """Of a file; "" for another kind of store."""
    scheme, _, path = address.partition("://")
    return os.path.expanduser(path) if f"{scheme}://" in (SQLITE, SCRATCH) else ""
