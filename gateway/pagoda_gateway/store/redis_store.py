"""Redis or Valkey, shared by several gateways: every call is one script, which the server runs atomically.

All keys share one hash tag, so that a cluster keeps them in one slot. The server's settings (`appendonly`,
`appendfsync`, replicas) determine what an acknowledged write survives. Records expire by the server's clock. Versions
never fall behind that clock, so a server that has lost its data does not reuse one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from pagoda_gateway.store import interface
from pagoda_gateway.store.interface import MAX_PAGE_BYTES, Conflict, Full, Page, Record, Unreadable, unavailable
from pagoda_proto import times

PREFIX = "{pagoda}:"
MAX_CONNECTIONS = 32
CONFLICT = -1
_VERSIONS, _EXPIRING = f"{PREFIX}versions", f"{PREFIX}expiring"

# KEYS: record
_GET = "return redis.call('HMGET', KEYS[1], 'owner', 'value', 'version', 'position', 'expires')"
# KEYS: record, versions, index, expiring. ARGV: value, owner, expected version or "", expiry in ms or 0, key
_PUT = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, 16)) do
  local record, index, key = string.match(gone, '^(.-)\\n(.-)\\n(.*)$')
  if redis.call('EXISTS', record) == 0 then redis.call('ZREM', index, key) end
  redis.call('ZREM', KEYS[4], gone)
end
local known = redis.call('HMGET', KEYS[1], 'version', 'position')
if ARGV[3] ~= '' and (known[1] or '0') ~= ARGV[3] then return -1 end
local version = math.max((tonumber(redis.call('GET', KEYS[2])) or 0) + 1, t[1] * 1000000 + t[2])
redis.call('SET', KEYS[2], version)
local position = known[2] or version
redis.call('HSET', KEYS[1], 'value', ARGV[1], 'owner', ARGV[2], 'version', version, 'position', position,
  'expires', ARGV[4])
redis.call('ZADD', KEYS[3], position, ARGV[5])
local expiring = KEYS[1] .. '\\n' .. KEYS[3] .. '\\n' .. ARGV[5]
if ARGV[4] == '0' then
  redis.call('PERSIST', KEYS[1])
  redis.call('ZREM', KEYS[4], expiring)
else
  redis.call('ZADD', KEYS[4], ARGV[4], expiring)
  redis.call('PEXPIREAT', KEYS[1], ARGV[4])
end
return version
"""
# KEYS: record. ARGV: expected version or "", prefix of the index's name, key
_DELETE = """
local known = redis.call('HMGET', KEYS[1], 'version', 'owner')
if ARGV[1] ~= '' and (known[1] or '0') ~= ARGV[1] then return -1 end
if not known[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', ARGV[2] .. known[2], ARGV[3])
return 1
"""
# KEYS: index. ARGV: prefix of record names, limit, position or "", 1 for newest first, room in bytes
_LIST = """
local found, room, reached = {}, tonumber(ARGV[5]), ARGV[3]
local newest = ARGV[4] == '1'
while true do
  local from = reached == '' and (newest and '+inf' or '-inf') or '(' .. reached
  local keys = newest and redis.call('ZREVRANGEBYSCORE', KEYS[1], from, '-inf', 'WITHSCORES', 'LIMIT', 0, 32)
    or redis.call('ZRANGEBYSCORE', KEYS[1], from, '+inf', 'WITHSCORES', 'LIMIT', 0, 32)
  if #keys == 0 then return {0, found} end
  for i = 1, #keys, 2 do
    reached = keys[i + 1]
    local record = redis.call('HMGET', ARGV[1] .. keys[i], 'owner', 'value', 'version', 'position', 'expires')
    if record[2] and record[3] then
      room = room - string.len(record[2])
      if #found == tonumber(ARGV[2]) or (#found > 0 and room < 0) then return {1, found} end
      table.insert(record, 1, keys[i])
      table.insert(found, record)
    end
  end
end
"""
# KEYS: log. ARGV: expected length or "", expiry in ms or 0 to leave it unchanged, parts
_APPEND = """
local length = redis.call('LLEN', KEYS[1])
if ARGV[1] ~= '' and tonumber(ARGV[1]) ~= length then return -1 end
for i = 3, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
if ARGV[2] ~= '0' then redis.call('PEXPIREAT', KEYS[1], ARGV[2]) end
return length + #ARGV - 2
"""
# KEYS: log. ARGV: start, room in bytes
_READ = """
local found, room, at = {}, tonumber(ARGV[2]), tonumber(ARGV[1])
local length = redis.call('LLEN', KEYS[1])
while at < length do
  local part = redis.call('LINDEX', KEYS[1], at)
  room = room - string.len(part)
  if #found > 0 and room < 0 then return found end
  table.insert(found, part)
  at = at + 1
end
return found
"""
# KEYS: key. ARGV: expiry in ms, or 0 for never
_KEEP = """
if ARGV[1] == '0' then return redis.call('PERSIST', KEYS[1]) end
return redis.call('PEXPIREAT', KEYS[1], ARGV[1])
"""
# KEYS: claim. ARGV: holder, lease in ms
_CLAIM = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
# KEYS: claim. ARGV: holder
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisStore:
    """Implements `Store`. `url` is as redis-py takes it: redis://, rediss:// or unix://."""

    def __init__(self, url: str) -> None:
        """Connects on the first call. Raises ValueError for an invalid URL."""
        never = Retry(NoBackoff(), 0)  # a command sent twice might be executed twice
        # Callers have a time budget. redis-py's own timeout uses wait_for, which may lose a cancellation.
        self._redis = Redis.from_url(url, max_connections=MAX_CONNECTIONS, retry=never, protocol=2, socket_timeout=None)
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)  # the pool raises, instead of waiting, if it has none left

    async def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        async with self._free:
            began = time.monotonic()
            try:
                return await self._redis.register_script(script)(keys=keys, args=arguments)
            except asyncio.CancelledError:
                if time.monotonic() - began > times.STORE_REST_S:  # probably the server's silence, not the caller
                    await self._drop_idle()
                raise
            except (RedisError, OSError, RuntimeError) as error:  # uvloop raises the last after a connection reset
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, ResponseError) and "WRONGTYPE" in why:
                    raise Unreadable(f"{keys[0]}: {why}") from error
                if isinstance(error, OutOfMemoryError):
                    raise Full(why) from error
                await self._drop_idle()
                raise unavailable(why, times.STORE_REST_S) from error

    async def _drop_idle(self) -> None:
        """Close idle connections: they lead to a server that may be gone."""
        with contextlib.suppress(RedisError, OSError, TimeoutError, RuntimeError):
            async with asyncio.timeout(times.STORE_REST_S):
                await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def _changed(self, script: str, keys: Sequence[str], *arguments: Any) -> int:
        """Run a script that writes. Raises Conflict if it returns CONFLICT."""
        result = int(await self._run(script, keys, *arguments))
        if result == CONFLICT:
            raise Conflict
        return result

    async def get(self, collection: str, key: str) -> Record | None:
        interface.check_collection(collection)
        fields: list[bytes | None] = await self._run(_GET, [_record_key(collection, key)])
        return None if fields[2] is None else _record(key.encode(), *fields)

    async def put(
        self,
        collection: str,
        key: str,
        value: bytes,
        *,
        owner: str = "",
        expect: int | None = None,
        expires_at: float | None = None,
    ) -> int:
        interface.check_collection(collection)
        interface.check_names(key, owner)
        interface.check_value(value)
        keys = [_record_key(collection, key), _VERSIONS, f"{_index_prefix(collection)}{owner}", _EXPIRING]
        return await self._changed(_PUT, keys, value, owner, _version(expect), _ms(expires_at), key)

    async def delete(self, collection: str, key: str, *, expect: int | None = None) -> bool:
        interface.check_collection(collection)
        keys = [_record_key(collection, key)]
        return bool(await self._changed(_DELETE, keys, _version(expect), _index_prefix(collection), key))

    async def page(
        self, collection: str, owner: str, *, limit: int, after: int | None = None, newest_first: bool = True
    ) -> Page:
        interface.check_collection(collection)
        interface.check_limit(limit)
        keys, records = [f"{_index_prefix(collection)}{owner}"], _record_key(collection, "")
        reached = "" if after is None else after
        more, rows = await self._run(_LIST, keys, records, limit, reached, int(newest_first), MAX_PAGE_BYTES)
        return Page([_record(*row) for row in rows], bool(more))

    async def append(
        self, log: str, parts: Sequence[bytes], *, index: int | None = None, expires_at: float | None = None
    ) -> int:
        interface.check_names(log)
        interface.check_parts(parts)
        return await self._changed(_APPEND, [_log_key(log)], _version(index), _ms(expires_at), *parts)

    async def read(self, log: str, start: int = 0) -> list[bytes]:
        parts: list[bytes] = await self._run(_READ, [_log_key(log)], start, MAX_PAGE_BYTES)
        return parts

    async def length(self, log: str) -> int:
        return int(await self._run("return redis.call('LLEN', KEYS[1])", [_log_key(log)]))

    async def keep_until(self, log: str, expires_at: float | None) -> None:
        await self._run(_KEEP, [_log_key(log)], _ms(expires_at))

    async def drop(self, log: str) -> None:
        await self._run("return redis.call('UNLINK', KEYS[1])", [_log_key(log)])

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        interface.check_names(name, holder)
        return bool(await self._run(_CLAIM, [f"{PREFIX}claim:{name}"], holder, max(1, int(lease_s * 1000))))

    async def release(self, name: str, holder: str) -> None:
        await self._run(_RELEASE, [f"{PREFIX}claim:{name}"], holder)

    async def aclose(self) -> None:
        await self._redis.aclose()


def _record_key(collection: str, key: str) -> str:
    return f"{PREFIX}record:{collection}:{key}"


def _index_prefix(collection: str) -> str:
    return f"{PREFIX}index:{collection}:"


def _log_key(log: str) -> str:
    return f"{PREFIX}log:{log}"


def _version(expect: int | None) -> int | str:
    return "" if expect is None else expect


def _ms(expires_at: float | None) -> int:
    return 0 if expires_at is None else max(1, int(expires_at * 1000))


def _record(key: bytes, *fields: Any) -> Record:
    """Raises Unreadable for a hash with other fields."""
    owner, value, version, position, expires_ms = fields
    try:
        expires_at = int(expires_ms) / 1000 or None
        return Record(key.decode(), owner.decode(), bytes(value), int(version), int(position), expires_at)
    except (TypeError, AttributeError, ValueError) as error:
        raise Unreadable(f"the record {key!a}: {error}") from error
