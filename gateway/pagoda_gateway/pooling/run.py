"""Runs each input of a body as its own request, for one answer: all of them succeed, or all are aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from pagoda_gateway.engine.interface import EngineClient
from pagoda_gateway.keys.charge import Charge
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason, RequestRecord, Usage

MAX_OPEN = 128
"""Requests of one body that are open at once: enough to fill steps without filling the queue for everybody."""


class PoolRun:
    """`run` it once. `usage` counts all prompts, and the cached tokens so far."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        self._records = records
        self._found: list[bytes] = [b""] * len(records)
        self._cached = 0

    def usage(self) -> Usage:
        tokens = sum(len(record.prompt_token_ids) for record in self._records)
        return Usage(prompt_tokens=tokens, cached_prompt_tokens=self._cached)

    async def run(self, engine: EngineClient, charge: Charge) -> list[bytes]:
        """Returns the output of each record, in order. However it ends, no request stays open.

        Raises:
            PagodaError: a request failed or was not admitted.
        """
        charge.begin(self.usage)
        left = iter(enumerate(self._records))
        readers = [asyncio.ensure_future(self._read(engine, charge, left)) for _ in self._records[:MAX_OPEN]]
        try:
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            charge.end(self.usage())
        return self._found

    async def _read(self, engine: EngineClient, charge: Charge, left: Iterator[tuple[int, RequestRecord]]) -> None:
        for index, record in left:
            self._found[index] = await self._read_one(engine, charge, record)

    async def _read_one(self, engine: EngineClient, charge: Charge, record: RequestRecord) -> bytes:
        generation = await engine.submit(record)
        try:
            charge.taken()
            data = b""
            while deltas := await generation.next():
                for delta in deltas:
                    data = delta.pooled or data
                    if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        code = delta.error_code or ErrorCode.STREAM_INTERRUPTED
                        raise PagodaError(code, delta.error_message or "the request was aborted")
                    if delta.usage is not None:
                        self._cached += delta.usage.cached_prompt_tokens
            if not data:
                raise PagodaError(ErrorCode.STREAM_INTERRUPTED, "the request ended early", retry_after_s=1.0)
            return data
        finally:
            await generation.aclose()
