"""A store never decides: it keeps bytes, and rejects a write by a caller that has not seen the current state.

It holds three kinds of things, each in a namespace of its own:

    record    a value under (collection, key), with an owner that never changes and a version that every write raises
    log       parts in the order in which they were appended: content of a file, events of an answer
    claim     a name that one holder has until its lease expires, for work that one process should do

Concurrent writers are detected by the version, or by the index at which they append, never by a clock; a claim only
avoids duplicate work. Expired entries do not exist. A call that fails or is cancelled may have taken effect; to repeat
it with the version known before is safe, because it then takes effect only once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from pagoda_proto.errors import ErrorCode, PagodaError

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 256
MAX_VALUE_BYTES = 1024 * 1024
MAX_PART_BYTES = 1024 * 1024
MAX_APPEND_BYTES = 4 * 1024 * 1024
MAX_PAGE_BYTES = 1024 * 1024  # per read, unless a single record or part is larger
MAX_PAGE_RECORDS = 1000
ABSENT = 0  # the version of a record that does not exist
_COLLECTION = re.compile(r"[a-z][a-z_]{0,63}")
T = TypeVar("T")


class Record(NamedTuple):
    """`position` orders a collection's records by when they were first put. `expires_at` is in Unix seconds."""

    key: str
    owner: str
    value: bytes
    version: int
    position: int
    expires_at: float | None


class Page(NamedTuple):
    """`more`: there are records after the last one here."""

    records: list[Record]
    more: bool


class Conflict(Exception):
    """Another writer was first: a record has another version, or a log another length."""


class Unreadable(PagodaError):
    """The data under one name is not this program's, or is another version's. For callers that want it, this is as if
    the store were unreachable; it says nothing about the rest of the store."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "what this server keeps of this cannot be read now", None, 1.0)
        self.add_note(why)
        _warn(why)


class Full(PagodaError):
    """There is no room for a write. Reads still work; on a full disk, the journal has no room for deletions either."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "this server has no room to keep anything more", None, 10.0)
        self.add_note(why)


@lru_cache(maxsize=1024)
def _warn(why: str) -> None:
    """Warn once per cause, because the same entry is met again and again."""
    logger.warning("something in the store cannot be read: %.300s", why)


def decoded(name: str, value: bytes, kind: type[T]) -> T:
    """Decode the JSON value of a record or a log. Raises Unreadable."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError, PagodaError) as error:
        raise Unreadable(f"{name}: {error}") from error


def unavailable(why: str, retry_after_s: float) -> PagodaError:
    """`why` is for the log only: the client's message contains no address and no path."""
    message = "this server's store cannot be reached at the moment; try again"
    error = PagodaError(ErrorCode.UNAVAILABLE, message, retry_after_s=retry_after_s)
    error.add_note(why)
    return error


def parts_of(data: bytes) -> list[bytes]:
    """Split data into as few parts as possible, each small enough for a log."""
    return [data[i : i + MAX_PART_BYTES] for i in range(0, len(data), MAX_PART_BYTES)]


class Store(Protocol):
    """All methods raise PagodaError UNAVAILABLE if the store cannot be reached, Full if a write finds no room,
    Unreadable if something else lies under the name, and ValueError for a size or name beyond the limits above, which
    callers check first."""

    async def get(self, collection: str, key: str) -> Record | None: ...

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
        """Write a whole record, and return its version.

        Args:
            owner: The same at every put of a record.
            expect: The version to replace, ABSENT if there must be none; None replaces any version.
            expires_at: In Unix seconds; None means never, whatever an earlier put said.

        Raises:
            Conflict: the record has another version.
        """
        ...

    async def delete(self, collection: str, key: str, *, expect: int | None = None) -> bool:
        """Returns whether it was there. Raises Conflict as `put` does."""
        ...

    async def page(
        self, collection: str, owner: str, *, limit: int, after: int | None = None, newest_first: bool = True
    ) -> Page:
        """An owner's records by position, starting beyond `after`; fewer than `limit` if they are large."""
        ...

    async def append(
        self, log: str, parts: Sequence[bytes], *, index: int | None = None, expires_at: float | None = None
    ) -> int:
        """Append all parts or none, and return the log's new number of parts.

        Args:
            index: The number of parts that the log must have before; None appends in any case.
            expires_at: When the log expires, in Unix seconds; None leaves that unchanged, initially never.

        Raises:
            Conflict: the log does not have `index` parts.
        """
        ...

    async def read(self, log: str, start: int = 0) -> list[bytes]:
        """Parts from index `start` on, as many as fit on a page; none at the end."""
        ...

    async def length(self, log: str) -> int:
        """In parts."""
        ...

    async def keep_until(self, log: str, expires_at: float | None) -> None:
        """Set the expiry, as with `append`, but None means never. Does nothing to an empty log."""
        ...

    async def drop(self, log: str) -> None: ...

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        """Take or renew a claim for `lease_s`; returns whether `holder` has it now."""
        ...

    async def release(self, name: str, holder: str) -> None:
        """Does nothing to a claim of another holder."""
        ...

    async def aclose(self) -> None: ...


def check_names(*names: str) -> None:
    for name in names:
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise ValueError(f"a name has at most {MAX_NAME_CHARS} printable characters, got {len(name)}")


def check_collection(collection: str) -> None:
    if not _COLLECTION.fullmatch(collection):
        raise ValueError(f"a collection is named in lower case, got {collection[:64]!a}")


def check_value(value: bytes) -> None:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a record has at most {MAX_VALUE_BYTES} bytes, got {len(value)}")


def check_parts(parts: Sequence[bytes]) -> None:
    longest, together = max(map(len, parts), default=0), sum(map(len, parts))
    if not parts or longest > MAX_PART_BYTES or together > MAX_APPEND_BYTES:
        limits = f"{MAX_PART_BYTES} bytes a part, {MAX_APPEND_BYTES} together"
        raise ValueError(f"one or more parts are appended, {limits}; got {len(parts)} of {together} bytes")


def check_limit(limit: int) -> None:
    if not 0 < limit <= MAX_PAGE_RECORDS:
        raise ValueError(f"1 to {MAX_PAGE_RECORDS} records can be listed at once, got {limit}")


async def read_whole(store: Store, log: str) -> bytes:
    """All bytes of a log to which nothing is added any more; b"" if there is none, or if it vanishes meanwhile."""
    num_parts, found = await store.length(log), list[bytes]()
    while len(found) < num_parts:
        if not (parts := await store.read(log, len(found))):
            return b""
        found += parts
    return b"".join(found)
