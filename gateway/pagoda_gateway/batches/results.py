"""The results of a batch are one log that holds each line's result once, because writers append at a known length.

A writer that has not seen what another one appended gets a conflict, reads on, and leaves out the lines already there.
Only this keeps two gateways, or two lives of one, from answering a line twice; claims merely avoid duplicate work.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from pagoda_gateway.batches.batch import Counts
from pagoda_gateway.store.interface import MAX_APPEND_BYTES, Conflict, Store, decoded, parts_of

ROOM_BYTES = 16 * 1024  # part of an append left for everything around an answer
AROUND_BYTES = 64  # bytes of a result around its `written`
MAX_ANSWER_BYTES = MAX_APPEND_BYTES - ROOM_BYTES


class Lost(Exception):
    """The log is shorter than before: another gateway has ended the batch, or the store was reset to an earlier state.
    To continue, start from the batch's current state."""


class Result(msgspec.Struct, frozen=True):
    """The outcome of a line: `written` is its line in the output file or, if it `failed`, the error file, as JSON."""

    line: int
    failed: bool
    written: msgspec.Raw


def answered(line: int, custom_id: str, request_id: str, answer: bytes) -> Result:
    return _result(line, custom_id, _response(request_id, 200, msgspec.Raw(answer)), None, failed=False)


def refused(line: int, custom_id: str, request_id: str, status: int, body: dict[str, Any]) -> Result:
    """The server refused the line, as it would have refused a request."""
    return _result(line, custom_id, _response(request_id, status, body), None, failed=True)


def given_up(line: int, custom_id: str, code: str, message: str) -> Result:
    """The line was never answered."""
    return _result(line, custom_id, None, {"code": code, "message": message}, failed=True)


def _response(request_id: str, status: int, body: Any) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _result(line: int, custom_id: str, response: Any, error: Any, *, failed: bool) -> Result:
    content = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}
    return Result(line, failed, msgspec.Raw(msgspec.json.encode(content)))


class Results:
    """One process's view of the log. `load` it first."""

    def __init__(self, store: Store, log: str) -> None:
        self._store = store
        self._log = log
        self._length = 0
        self._rest = b""
        self._failed: dict[int, bool] = {}  # by line
        self._waiting: dict[int, Result] = {}  # by line
        self._lock = asyncio.Lock()

    def has(self, line: int) -> bool:
        return line in self._failed

    @property
    def num_lines(self) -> int:
        return len(self._failed)

    def counts(self, total: int) -> Counts:
        failed = sum(self._failed.values())
        return Counts(total, len(self._failed) - failed, failed)

    async def load(self) -> None:
        """Read on to the current end of the log."""
        async for results in self._read_on():
            self._failed |= {result.line: result.failed for result in results}

    async def _read_on(self) -> AsyncIterator[list[Result]]:
        while parts := await self._store.read(self._log, self._length):
            *whole, self._rest = (self._rest + b"".join(parts)).split(b"\n")
            self._length += len(parts)
            yield [decoded(self._log, data, Result) for data in whole]

    async def write(self, results: Sequence[Result]) -> None:
        """When this returns, the results are in the log. Concurrent calls are written together.

        Raises:
            PagodaError: UNAVAILABLE; the results may be in the log, and may be written again.
            Lost: this view of the log is outdated and must not write any more.
        """
        self._waiting |= {result.line: result for result in results}
        async with self._lock:
            while self._waiting:
                group = _first(list(self._waiting.values()))
                await self._append(group)
                for result in group:
                    self._waiting.pop(result.line, None)

    async def _append(self, group: Sequence[Result]) -> None:
        while new := [result for result in group if not self.has(result.line)]:
            data = b"".join(msgspec.json.encode(result) + b"\n" for result in new)
            try:
                self._length = await self._store.append(self._log, parts_of(data), index=self._length)
            except Conflict:
                known = self._length
                await self.load()
                if self._length == known:
                    raise Lost from None
                continue
            self._failed |= {result.line: result.failed for result in new}

    async def all(self) -> AsyncIterator[Result]:
        """All results, in the order of the log."""
        async for results in Results(self._store, self._log)._read_on():
            for result in results:
                yield result


def _first(waiting: Sequence[Result]) -> list[Result]:
    """As many as fit in one append, and at least one, which always fits."""
    room = MAX_APPEND_BYTES

    def fitting() -> Iterator[Result]:
        nonlocal room
        for result in waiting:
            room -= memoryview(result.written).nbytes + AROUND_BYTES
            if room < 0:
                return
            yield result

    return list(fitting()) or list(waiting[:1])
