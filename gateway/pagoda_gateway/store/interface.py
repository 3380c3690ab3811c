"""A store never decides: it keeps bytes, and says no to whoever wrote without having seen what is there now.

Three things are in it, each under names of its own:

    record    a value under (collection, key), with an owner that never changes and a version that every write raises
    log       parts in the order in which they were appended; content of a file, events of an answer
    claim     a name that one holder has until its lease is over, for work that one process should do

Two writers of the same thing are told apart by version, or by the index at which they append, never by a clock: a
claim only spares work that would be done twice. What has expired is not there. A call that fails, or is cancelled, may
have been done all the same; who repeats it with the version it knew does it once.
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
MAX_PAGE_BYTES = 1024 * 1024  # what is read in one go, or one record or part that is larger
MAX_PAGE_RECORDS = 1000
ABSENT = 0  # the version of what is not there
_COLLECTION = re.compile(r"[a-z][a-z_]{0,63}")
T = TypeVar("T")


class Record(NamedTuple):
    """`position` orders the records of a collection by when they were first put. `expires_at` in Unix seconds."""

    key: str
    owner: str
    value: bytes
    version: int
    position: int
    expires_at: float | None


class Page(NamedTuple):
    """`more`: there are records after the last of these."""

    records: list[Record]
    more: bool


class Conflict(Exception):
    """Somebody else wrote first: a record has another version, or a log another length."""


class Unreadable(PagodaError):
    """What lies under one name is nobody's of this program, or of another version: to whoever wants it as if the store
    were gone, and no word about anything else in it."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "what this server keeps of this cannot be read now", None, 1.0)
        self.add_note(why)
        _warn(why)


class Full(PagodaError):
    """There is no room for what was to be written. What is there can be read; where a disk is full, a journal has no
    room for deletions either."""

    def __init__(self, why: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "this server has no room to keep anything more", None, 10.0)
        self.add_note(why)


@lru_cache(maxsize=1024)
def _warn(why: str) -> None:
    """Once: it is come upon again and again."""
    logger.warning("something in the store cannot be read: %.300s", why)


def decoded(name: str, value: bytes, kind: type[T]) -> T:
    """The value of a record or a log, from JSON. Raises Unreadable."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError, PagodaError) as error:
        raise Unreadable(f"{name}: {error}") from error


def unavailable(why: str, retry_after_s: float) -> PagodaError:
    """`why` is for the log: what a client is told has no address and no path."""
    message = "this server's store cannot be reached at the moment; try again"
    error = PagodaError(ErrorCode.UNAVAILABLE, message, retry_after_s=retry_after_s)
    error.add_note(why)
    return error


def parts_of(data: bytes) -> list[bytes]:
    """As few as may be, each of them a part that a log takes."""
    return [data[i : i + MAX_PART_BYTES] for i in range(0, len(data), MAX_PART_BYTES)]


class Store(Protocol):
    """All methods raise PagodaError UNAVAILABLE where the store cannot be asked, Full where a write finds no room,
    Unreadable where something else lies under the name, and ValueError for a size or a name beyond the limits above,
    which callers check before."""

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
        """Write a record whole, and return its version.

        Args:
            owner: The same at every put of a record.
            expect: The version that is to be replaced, ABSENT for none; None replaces whatever is there.
            expires_at: In Unix seconds; None keeps it, whatever was said before.

        Raises:
            Conflict: it has another version.
        """
        ...

    async def delete(self, collection: str, key: str, *, expect: int | None = None) -> bool:
        """Whether it was there. Raises Conflict as `put` does."""
        ...

    async def page(
        self, collection: str, owner: str, *, limit: int, after: int | None = None, newest_first: bool = True
    ) -> Page:
        """Records of an owner by position, those beyond the position `after`; fewer than `limit` if they are large."""
        ...

    async def append(
        self, log: str, parts: Sequence[bytes], *, index: int | None = None, expires_at: float | None = None
    ) -> int:
        """Append all parts or none, and return the number of parts that there are then.

        Args:
            index: The number of parts that there are before.
            expires_at: When the log is to vanish, in Unix seconds; None leaves that as it is, from the start never.

        Raises:
            Conflict: the log does not have `index` parts.
        """
        ...

    async def read(self, log: str, start: int = 0) -> list[bytes]:
        """Parts from the index `start` on, as many as make a page; none at the end."""
        ...

    async def length(self, log: str) -> int:
        """In parts."""
        ...

    async def keep_until(self, log: str, expires_at: float | None) -> None:
        """As with `append`, but None for never. Nothing where it is empty."""
        ...

    async def drop(self, log: str) -> None: ...

    async def claim(self, name: str, holder: str, lease_s: float) -> bool:
        """Whether `holder` has it now, for so long; who has it already prolongs it."""
        ...

    async def release(self, name: str, holder: str) -> None:
        """Nothing happens to a claim of somebody else."""
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
