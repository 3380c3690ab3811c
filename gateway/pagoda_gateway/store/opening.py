"""Makes a store from its address, without connecting: a gateway serves even if its store is unreachable."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from pagoda_gateway.store.interface import Store
from pagoda_gateway.store.sqlite_store import MEMORY, SqliteStore

SQLITE, SCRATCH = "sqlite://", "scratch://"
SHARED = ("redis", "rediss", "unix")


def store_problem(address: str) -> str:
    """What is wrong with an address, or "". The message does not repeat the address, which may hold a password."""
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
    """Whether data kept there outlives the processes that wrote it."""
    return address not in ("", MEMORY) and not address.startswith(SCRATCH)


def open_store(address: str) -> Store:
    """Open a store; "" is one in memory. The path of sqlite:///path is absolute; scratch:///path is bounded in size
    and does not survive a power failure.

    Raises:
        ValueError: the address is invalid, or a package that it needs is not installed.
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
    """The path of a store in a file; "" for other stores."""
    scheme, _, path = address.partition("://")
    return os.path.expanduser(path) if f"{scheme}://" in (SQLITE, SCRATCH) else ""
