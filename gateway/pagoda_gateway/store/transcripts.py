"""Transcripts of each key's latest requests: stored after the answers, which never wait for them.

They are opt-in, because they hold prompts and answers. A transcript is a small record, with its bytes in a log beside
it; if an owner has too many, the oldest are deleted. Transcripts that arrive faster than the store accepts them are
dropped, and the log says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from pagoda_gateway.store.interface import MAX_APPEND_BYTES, MAX_PAGE_RECORDS, Conflict, Store, parts_of, read_whole
from pagoda_proto import times
from pagoda_proto.errors import PagodaError

TRANSCRIPTS = "transcripts"
MAX_WAITING_BYTES = 8 * MAX_APPEND_BYTES
MAX_OWNERS = 4096  # for whom the number of transcripts is remembered

logger = logging.getLogger(__name__)


class Waiting(NamedTuple):
    owner: str
    data: bytes


class Transcripts:
    """Keeps at most `most` per owner, or none if 0; several gateways may each exceed that by a tenth. The process calls
    `start` and `aclose`."""

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._most = most
        self._spare = 1 + most // 10  # this many may be added before they are counted again
        self._waiting: dict[str, Waiting] = {}
        self._num_bytes = 0
        self._added: dict[str, int] = {}  # per owner, since the last count
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> bool:
        return self._most > 0

    def keep(self, owner: str, request_id: str, data: bytes) -> None:
        """Queue a transcript for writing. Never fails or waits."""
        if len(data) > MAX_APPEND_BYTES or self._num_bytes + len(data) > MAX_WAITING_BYTES:
            why = "it is too large" if len(data) > MAX_APPEND_BYTES else "the store is too slow for them"
            logger.warning("the transcript of %s is not kept: %s", request_id, why)
            return
        name = _name(owner, request_id)
        self._num_bytes += len(data) - len(self._waiting.pop(name, Waiting("", b"")).data)
        self._waiting[name] = Waiting(owner, data)
        self._news.set()

    async def find(self, owner: str, request_id: str) -> bytes | None:
        """Raises PagodaError if the store cannot be reached."""
        name = _name(owner, request_id)
        if (waiting := self._waiting.get(name)) is not None:
            return waiting.data
        record = await self._store.get(TRANSCRIPTS, name)
        if record is None or record.owner != owner:
            return None
        return await read_whole(self._store, _log(name)) or None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="transcripts")

    async def aclose(self) -> None:
        """Write what is left, if the store accepts it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with suppress(PagodaError, TimeoutError):
            async with asyncio.timeout(times.USAGE_LAST_S):
                await self.flush()
        if self._waiting:
            logger.warning("%d transcripts are lost: the store cannot be reached", len(self._waiting))

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self.flush()
            except PagodaError:  # the store's guard has said so
                await asyncio.sleep(times.STORE_REST_S)
                self._news.set()
            except Exception:
                logger.exception("transcripts could not be written; retrying")
                await asyncio.sleep(times.STORE_REST_S)
                self._news.set()

    async def flush(self) -> None:
        """Write everything queued. Raises PagodaError; what is not written yet stays queued."""
        while self._waiting:
            name, waiting = next(iter(self._waiting.items()))
            await self._make_room(waiting.owner)
            await self._write(name, waiting)
            if self._waiting.get(name) is waiting:  # not replaced meanwhile by another of the same name
                del self._waiting[name]
                self._num_bytes -= len(waiting.data)

    async def _write(self, name: str, waiting: Waiting) -> None:
        expires_at, log = time.time() + times.KEPT_S, _log(name)
        await self._store.drop(log)
        with suppress(Conflict):  # another gateway is writing one of the same name
            await self._store.append(log, parts_of(waiting.data), index=0, expires_at=expires_at)
        await self._store.put(TRANSCRIPTS, name, b"", owner=waiting.owner, expires_at=expires_at)
        self._added[waiting.owner] = self._added.get(waiting.owner, 0) + 1

    async def _make_room(self, owner: str) -> None:
        if self._added.get(owner, self._spare) < self._spare:
            return
        names = await self._names(owner)
        await self._drop(names[: max(0, len(names) + self._spare - self._most)])
        if len(self._added) >= MAX_OWNERS:
            self._added.clear()
        self._added[owner] = 0

    async def _names(self, owner: str) -> list[str]:
        """Oldest first."""
        found: list[str] = []
        after = None
        while True:
            page = await self._store.page(TRANSCRIPTS, owner, limit=MAX_PAGE_RECORDS, after=after, newest_first=False)
            found += [record.key for record in page.records]
            if not page.more:
                return found
            after = page.records[-1].position

    async def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            await self._store.delete(TRANSCRIPTS, name)
            await self._store.drop(_log(name))


def _name(owner: str, request_id: str) -> str:
    """Includes the owner, because clients may name requests and two tenants may choose the same name."""
    return hashlib.sha256(f"{len(owner)} {owner}{request_id}".encode()).hexdigest()


def _log(name: str) -> str:
    return f"transcript/{name}"
