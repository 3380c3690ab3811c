"""Keys in the store. A revoked key stays as a record, so a server that has had keys never becomes open again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pagoda_gateway.keys.api_key import ApiKey, NewKey, is_id
from pagoda_gateway.store.interface import ABSENT, Conflict, Record, Store, decoded
from pagoda_proto.errors import ErrorCode, PagodaError

KEYS = "api_keys"
OWNER = ""  # the owner of all key records


class KeyPage(NamedTuple):
    keys: list[ApiKey]
    more: bool


class KeyRegister:
    """`clock` returns Unix seconds. All methods raise PagodaError UNAVAILABLE as the store does."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    async def create(self, asked: NewKey) -> tuple[ApiKey, str]:
        """Returns the record, and the key itself, which is stored nowhere. Raises InvalidParams."""
        key, text = asked.made(self._clock())
        await self._store.put(KEYS, key.id, msgspec.json.encode(key), owner=OWNER, expect=ABSENT)
        return key, text

    async def find(self, key_id: str) -> ApiKey | None:
        found = await self._store.get(KEYS, key_id)
        return None if found is None else _read(found)

    async def any(self) -> bool:
        """Whether there is a key, or ever was one."""
        return bool((await self._store.page(KEYS, OWNER, limit=1)).records)

    async def page(self, *, limit: int, after: str | None = None, newest_first: bool = True) -> KeyPage:
        """Raises PagodaError NOT_FOUND if there is no key `after`."""
        reached = None if after is None else (await self._record(after)).position
        page = await self._store.page(KEYS, OWNER, limit=limit, after=reached, newest_first=newest_first)
        return KeyPage([_read(record) for record in page.records], page.more)

    async def get(self, key_id: str) -> ApiKey:
        """Raises PagodaError NOT_FOUND."""
        return _read(await self._record(key_id))

    async def revoke(self, key_id: str) -> ApiKey:
        """Returns the revoked key; one that was revoked before is unchanged. Raises PagodaError NOT_FOUND."""
        while True:
            record = await self._record(key_id)
            key = _read(record)
            if key.revoked_at is not None:
                return key
            key = msgspec.structs.replace(key, revoked_at=int(self._clock()))
            try:
                await self._store.put(KEYS, key.id, msgspec.json.encode(key), owner=OWNER, expect=record.version)
            except Conflict:
                continue
            return key

    async def _record(self, key_id: str) -> Record:
        found = await self._store.get(KEYS, key_id) if is_id(key_id) else None
        if found is None:
            raise PagodaError(ErrorCode.NOT_FOUND, f"there is no API key {key_id[:64]!a}")
        return found


def _read(record: Record) -> ApiKey:
    """A record that cannot be read, perhaps because a later version wrote it, raises Unreadable and opens nothing."""
    return decoded(record.key, record.value, ApiKey)
