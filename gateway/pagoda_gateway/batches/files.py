"""A file is a record and a log of the same id: it can be found once its content is complete; the record goes first.

During an upload, the record reserves the room that the file may take, so that two uploads cannot use the same room; if
the process dies meanwhile, what it leaves behind expires. A file belongs to one tenant; for others it does not exist.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec

from pagoda_gateway.store.interface import MAX_PAGE_RECORDS, MAX_PART_BYTES, Record, Store, decoded
from pagoda_proto.errors import ErrorCode, PagodaError

FILES = "files"
UPLOAD_KEPT_S = 2 * 3600.0  # lifetime of what is left of an upload whose gateway died
GOING_S = 600.0  # .. or of a file whose deletion was interrupted
BATCH, BATCH_OUTPUT = "batch", "batch_output"  # purposes


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """While `uploading`, `bytes` is the room that the file may take. Times are in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    uploading: bool = False

    @property
    def log(self) -> str:
        return f"file.{self.id}"


class FileLimits(NamedTuple):
    """For one file, and for all files of a tenant together."""

    max_bytes: int
    max_bytes_together: int


class FilePage(NamedTuple):
    files: list[FileInfo]
    more: bool


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def not_found(kind: str, id: str) -> PagodaError:
    return PagodaError(ErrorCode.NOT_FOUND, f"there is no {kind} {id[:64]!a}")


class Files:
    """`clock`: Unix seconds."""

    def __init__(self, store: Store, limits: FileLimits, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock

    async def begin(self, owner: str, num_bytes: int | None) -> Upload:
        """Begin a file of at most `num_bytes`, or of the maximum for a file if None.

        Raises:
            PagodaError: REQUEST_TOO_LARGE if the owner's files would take more room than allowed.
        """
        room = min(self._limits.max_bytes, num_bytes or self._limits.max_bytes)
        now = self._clock()
        info = FileInfo(id=new_file_id(), bytes=room, created_at=int(now), filename="", purpose=BATCH, uploading=True)
        expires_at = now + UPLOAD_KEPT_S
        await self._store.put(FILES, info.id, msgspec.json.encode(info), owner=owner, expires_at=expires_at)
        upload = Upload(self._store, owner, info, expires_at)
        try:
            if await self._bytes_of(owner) > self._limits.max_bytes_together:
                limit = self._limits.max_bytes_together
                message = f"your files may have {limit} bytes together, with this one they would have more; delete some"
                raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, message, "file")
        except PagodaError:
            await upload.discard()
            raise
        return upload

    async def _bytes_of(self, owner: str) -> int:
        total, after = 0, None
        while True:
            page = await self._store.page(FILES, owner, limit=MAX_PAGE_RECORDS, after=after)
            total += sum(_read(record).bytes for record in page.records)
            if not page.more:
                return total
            after = page.records[-1].position

    async def find(self, owner: str, file_id: str) -> FileInfo:
        """Raises PagodaError NOT_FOUND."""
        return _read(await self._record(owner, file_id))

    async def _record(self, owner: str, file_id: str) -> Record:
        record = await self._store.get(FILES, file_id)
        if record is None or record.owner != owner or _read(record).uploading:
            raise not_found("file", file_id)
        return record

    async def page(
        self, owner: str, *, limit: int, after: str | None, newest_first: bool, purpose: str | None
    ) -> FilePage:
        """Raises PagodaError NOT_FOUND if there is no file `after`."""
        reached = None if after is None else (await self._record(owner, after)).position
        found: list[FileInfo] = []
        while True:
            room = min(limit + 1 - len(found), MAX_PAGE_RECORDS)
            page = await self._store.page(FILES, owner, limit=room, after=reached, newest_first=newest_first)
            infos = [info for record in page.records if not (info := _read(record)).uploading]
            found += [info for info in infos if purpose in (None, info.purpose)]
            if len(found) > limit or not page.more:
                return FilePage(found[:limit], len(found) > limit)
            reached = page.records[-1].position

    async def content(self, info: FileInfo) -> AsyncIterator[bytes]:
        """Raises PagodaError NOT_FOUND if content is missing, because the file was deleted meanwhile."""
        at = num_bytes = 0
        while num_bytes < info.bytes:
            parts = await self._store.read(info.log, at)
            if not parts:
                raise not_found("file", info.id)
            at += len(parts)
            content = b"".join(parts)
            num_bytes += len(content)
            yield content

    async def delete(self, owner: str, file_id: str) -> None:
        """Raises PagodaError NOT_FOUND."""
        info = _read(await self._record(owner, file_id))
        await self._store.keep_until(info.log, self._clock() + GOING_S)
        await self._store.delete(FILES, file_id)
        await self._store.drop(info.log)


async def keep(store: Store, owner: str, info: FileInfo, *, expect: int | None = None) -> None:
    """Make a file from a log that is already written. Raises Conflict as `Store.put` does."""
    await store.keep_until(info.log, info.expires_at)
    value = msgspec.json.encode(info)
    await store.put(FILES, info.id, value, owner=owner, expect=expect, expires_at=info.expires_at)


def _read(record: Record) -> FileInfo:
    return decoded(record.key, record.value, FileInfo)


class Upload:
    """`write` data as it arrives, then `finish` or `discard`."""

    def __init__(self, store: Store, owner: str, info: FileInfo, expires_at: float) -> None:
        self._store = store
        self._owner = owner
        self._info = info
        self._expires_at = expires_at
        self._pending = bytearray()
        self._num_parts = 0
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Raises PagodaError REQUEST_TOO_LARGE."""
        self.num_bytes += len(data)
        if self.num_bytes > self._info.bytes:
            why = f"the file must have at most {self._info.bytes} bytes"
            raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, why, "file")
        self._pending += data
        while len(self._pending) >= MAX_PART_BYTES:
            await self._append(MAX_PART_BYTES)

    async def _append(self, num_bytes: int) -> None:
        part = bytes(memoryview(self._pending)[:num_bytes])
        del self._pending[:num_bytes]
        log, index, expires_at = self._info.log, self._num_parts, self._expires_at
        self._num_parts = await self._store.append(log, [part], index=index, expires_at=expires_at)

    async def finish(self, filename: str, purpose: str, kept_s: int | None) -> FileInfo:
        """Make the file available; it expires `kept_s` after its creation, or never if None."""
        if self._pending:
            await self._append(len(self._pending))
        expires_at = None if kept_s is None else self._info.created_at + kept_s
        info = msgspec.structs.replace(
            self._info,
            bytes=self.num_bytes,
            filename=filename,
            purpose=purpose,
            expires_at=expires_at,
            uploading=False,
        )
        await keep(self._store, self._owner, info)
        return info

    async def discard(self) -> None:
        await self._store.delete(FILES, self._info.id)
        await self._store.drop(self._info.log)
