"""A batch's files are a function of its results alone, part by part, so writing them again writes the same."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from pagoda_gateway.batches.batch import Batch, results_log
from pagoda_gateway.batches.files import BATCH_OUTPUT, FileInfo, keep
from pagoda_gateway.batches.results import Results
from pagoda_gateway.store.interface import ABSENT, MAX_PART_BYTES, Conflict, Store


class _FileWriter:
    """Writes lines to the log of a file, in parts that depend only on the lines."""

    def __init__(self, store: Store, info: FileInfo) -> None:
        self.num_bytes = 0
        self._store = store
        self._info = info
        self._pending = bytearray()
        self._num_parts = 0

    async def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._pending += data
        while len(self._pending) >= MAX_PART_BYTES:
            await self._append()

    async def _append(self) -> None:
        part = bytes(self._pending[:MAX_PART_BYTES])
        with suppress(Conflict):  # the part is already there
            await self._store.append(self._info.log, [part], index=self._num_parts)
        self._num_parts += 1
        del self._pending[:MAX_PART_BYTES]

    async def finish(self, owner: str) -> None:
        """Make the file available, unless it is empty."""
        if self._pending:
            await self._append()
        if self.num_bytes:
            info = msgspec.structs.replace(self._info, bytes=self.num_bytes)
            with suppress(Conflict):  # an earlier writer has read all results, too
                await keep(self._store, owner, info, expect=ABSENT)


async def write_files(store: Store, owner: str, batch: Batch) -> None:
    """Write the output and error files of a finalizing batch. Raises PagodaError UNAVAILABLE; then call it again."""
    output, errors = (_FileWriter(store, _file(batch, kind)) for kind in ("output", "error"))
    async for result in Results(store, results_log(batch.id)).all():
        await (errors if result.failed else output).write(bytes(result.written) + b"\n")
    for writer in (output, errors):
        await writer.finish(owner)


def _file(batch: Batch, kind: str) -> FileInfo:
    created_at = batch.finalizing_at or batch.created_at
    return FileInfo(
        id=batch.output_id if kind == "output" else batch.errors_id,
        bytes=0,
        created_at=created_at,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=BATCH_OUTPUT,
        expires_at=created_at + batch.output_kept_s,
    )
