"""Turns the texts and pairs of a body into records: checks limits first, then tokenises, then makes records."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller, origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.prompts import SLICE_CHARS, Reader, at_most
from pagoda_gateway.generation.requests import BYTES_PER_TOKEN, check_priority
from pagoda_gateway.pooling.asked import Asked, Reading
from pagoda_gateway.text.reading import Pair, Tokens
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import too_long
from pagoda_proto.pooling.kinds import CLASSIFY, EMBED, GENERATE
from pagoda_proto.pooling.params import TOKEN_EMBED, PoolingParams
from pagoda_proto.records import Pool, RequestRecord

BYTES_PER_NUMBER = 24  # of a vector, as received and as JSON
WHAT = {EMBED: "makes embeddings", CLASSIFY: "gives scores", GENERATE: "generates text"}

Given = str | Pair | list[int]


class Entry(NamedTuple):
    """One input. `params`: what the body calls its texts; `document`: at most this many tokens of the last one."""

    given: Given
    params: tuple[str, ...]
    document: int | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """None of an input that is token ids."""
        return () if isinstance(self.given, list) else (self.given,) if isinstance(self.given, str) else self.given

    @property
    def longest(self) -> str:
        """What the body calls the longest text."""
        found = zip(reversed(self.texts), reversed(self.params), strict=True)
        return max(found, key=lambda one: len(one[0]))[1] if self.texts else self.params[0]


def named(param: str, index: int, count: int) -> str:
    """What a body calls one of `count` texts."""
    return f"{param}[{index}]" if count > 1 else param


def check_kind(model: ServedModel, *kinds: str) -> None:
    """Raises InvalidParams unless the model is for one of `kinds`."""
    kind = model.text.reading.kind
    if kind not in kinds:
        wanted = " or ".join(WHAT[one] for one in kinds)
        raise InvalidParams(
            [Problem("model", f"{model.name!r} {WHAT[kind]}; this endpoint needs a model that {wanted}")]
        )


@dataclass(frozen=True)
class Inputs:
    """Reads the texts of one request."""

    ctx: GatewayContext
    model: ServedModel
    caller: Caller
    asked: Asked

    async def records(self, given: Sequence[Given]) -> list[RequestRecord]:
        """Make one record per input, in order; see `read`."""
        names = (named(self.asked.param, index, len(given)) for index in range(len(given)))
        return await self.read([Entry(one, (name,)) for one, name in zip(given, names, strict=True)])

    async def read(self, entries: Sequence[Entry]) -> list[RequestRecord]:
        """Make one record per entry, in order.

        Raises:
            PagodaError: there are too many inputs, one is too long, or the model lacks something requested.
        """
        asked = self.asked
        at_most(asked.param, len(entries), self.ctx.config.max_inputs)
        if not entries:
            raise InvalidParams([Problem(asked.param, "must have at least one text")])
        check_priority(self.ctx.config, self.model, asked.priority)
        self._check_output()
        reading = Reading.checked(self.model.text, self.model.limits, asked)
        read = iter(await self._tokens(reading, [one for one in entries if not isinstance(one.given, list)]))
        found = [reading.ids(one.given) if isinstance(one.given, list) else next(read) for one in entries]
        for entry, tokens in zip(entries, found, strict=True):
            self._check_length(entry, tokens)
        return [
            self._record(tokens, reading.params(one.given, tokens)) for one, tokens in zip(entries, found, strict=True)
        ]

    async def _tokens(self, reading: Reading, entries: Sequence[Entry]) -> list[Tokens]:
        """Tokenise texts, one slice's worth at a time; long texts are first counted, slice by slice."""
        found: list[Tokens] = []
        batch: list[Entry] = []
        size = 0
        for entry in entries:
            length = await self._checked(reading, entry)
            if batch and size + length > SLICE_CHARS:
                found += await self._read(reading, batch, size)
                batch, size = [], 0
            batch.append(entry)
            size += length
        return found + (await self._read(reading, batch, size) if batch else [])

    async def _checked(self, reading: Reading, entry: Entry) -> int:
        """Its number of characters. Raises PagodaError for a text that is certainly too long, before tokenising it."""
        for text, param in zip(entry.texts, entry.params, strict=True):
            cut = reading.keep is not None or (entry.document is not None and param == entry.params[-1])
            most = self.ctx.config.max_tokenize_chars if cut else None
            await Reader(self.ctx.pool, self.model, self.caller.key, param, 0, most).check(text)
        return sum(map(len, entry.texts))

    async def _read(self, reading: Reading, batch: list[Entry], size: int) -> list[Tokens]:
        def work() -> list[Tokens]:
            return [reading.tokens(one.given, one.document) for one in batch if not isinstance(one.given, list)]

        return await self.ctx.pool.run(self.caller.key, size, work, native=True)

    def _check_output(self) -> None:
        if self.model.text.reading.late is not None and self.asked.pooling.output == EMBED:
            message = f"{self.model.name!r} makes a vector of each token: use /pooling, /score or /rerank"
            raise InvalidParams([Problem("model", message)])

    def _check_length(self, entry: Entry, tokens: Tokens) -> None:
        most = self.model.limits.max_model_len
        if len(tokens.token_ids) > most:
            raise too_long(most, len(tokens.token_ids), 0, entry.longest)

    def _record(self, tokens: Tokens, params: PoolingParams) -> RequestRecord:
        return RequestRecord(
            request_id=secrets.token_hex(16),
            prompt_token_ids=tokens.token_ids,
            task=Pool(pooling=params),
            priority=self.asked.priority,
            **origin_of(self.caller, self.asked.cache_salt)._asdict(),
        )


def held_bytes(records: Sequence[RequestRecord], width: int) -> int:
    """Memory held for a body and its answer, in bytes."""
    tokens = sum(len(record.prompt_token_ids) for record in records)
    vectors = tokens if any(_of_tokens(record) for record in records) else len(records)
    return tokens * BYTES_PER_TOKEN + vectors * width * BYTES_PER_NUMBER


def _of_tokens(record: RequestRecord) -> bool:
    return isinstance(record.task, Pool) and record.task.pooling.output == TOKEN_EMBED
