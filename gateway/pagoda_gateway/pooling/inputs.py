"""Turns the texts and pairs of a body into records: checks limits first, then tokenises, then makes records."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Caller, origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.prompts import SLICE_CHARS, Reader, at_most
from pagoda_gateway.generation.requests import BYTES_PER_TOKEN, check_priority
from pagoda_gateway.text import reading
from pagoda_gateway.text.reading import Pair, Tokens
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import ModelLimits, too_long
from pagoda_proto.pooling.kinds import CLASSIFY, EMBED, GENERATE
from pagoda_proto.pooling.params import TOKEN_EMBED, PoolingParams
from pagoda_proto.records import Pool, RequestRecord

BYTES_PER_NUMBER = 24  # of a vector, as received and as JSON
WHAT = {EMBED: "makes embeddings", CLASSIFY: "gives scores", GENERATE: "generates text"}

Given = str | Pair | list[int]


def check_kind(model: ServedModel, *kinds: str) -> None:
    """Raises InvalidParams unless the model is for one of `kinds`."""
    kind = model.text.reading.kind
    if kind not in kinds:
        wanted = " or ".join(WHAT[one] for one in kinds)
        raise InvalidParams(
            [Problem("model", f"{model.name!r} {WHAT[kind]}; this endpoint needs a model that {wanted}")]
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The fields of a body besides its texts. `param`: its name for the texts; `keep`: at most this many tokens of each
    text, -1 for the model's context; `left`: truncate at the beginning; `instruction`: for models that take one."""

    param: str
    pooling: PoolingParams
    keep: int | None = None
    left: bool = False
    special: bool = True
    prompt_name: str | None = None
    instruction: str | None = None
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class Inputs:
    """Reads the texts of one request."""

    ctx: GatewayContext
    model: ServedModel
    caller: Caller
    asked: Asked

    async def records(self, given: Sequence[Given]) -> list[RequestRecord]:
        """Make one record per input, in order.

        Raises:
            PagodaError: there are too many inputs, one is too long, or the model lacks something requested.
        """
        asked, limits = self.asked, self.model.limits
        at_most(asked.param, len(given), self.ctx.config.max_inputs)
        if not given:
            raise InvalidParams([Problem(asked.param, "must have at least one text")])
        check_priority(self.ctx.config, self.model, asked.priority)
        self._check_output()
        self._check_dimensions()
        prompt, skip = self._prompt()
        keep = self._keep(limits)
        texts = [one for one in given if not isinstance(one, list)]
        read = iter(await self._tokens([_prefixed(prompt, one) for one in texts], keep))
        found = [Tokens(one[:keep]) if isinstance(one, list) else next(read) for one in given]
        for index, tokens in enumerate(found):
            self._check_length(tokens, limits, index if len(given) > 1 else None)
        return [self._record(tokens, skip) for tokens in found]

    async def _tokens(self, texts: Sequence[str | Pair], keep: int | None) -> list[Tokens]:
        """Tokenise texts, one slice's worth at a time; long texts are first counted, slice by slice."""
        asked = self.asked
        reader = Reader(self.ctx.pool, self.model, self.caller.key, asked.param, 0)
        if keep is not None:
            reader = Reader(
                self.ctx.pool, self.model, self.caller.key, asked.param, 0, self.ctx.config.max_tokenize_chars, keep
            )
        found: list[Tokens] = []
        batch: list[str | Pair] = []
        size = 0
        for text in texts:
            length = await _checked(reader, text)
            if batch and size + length > SLICE_CHARS:
                found += await self._read(batch, keep, size)
                batch, size = [], 0
            batch.append(text)
            size += length
        return found + (await self._read(batch, keep, size) if batch else [])

    async def _read(self, batch: list[str | Pair], keep: int | None, size: int) -> list[Tokens]:
        read = self._reader(keep)
        return await self.ctx.pool.run(self.caller.key, size, lambda: [read(one) for one in batch], native=True)

    def _reader(self, keep: int | None) -> Callable[[str | Pair], Tokens]:
        text, asked = self.model.text, self.asked
        return partial(
            reading.tokens_of, text.reading, text.tokenizer, text.special,
            keep=keep, left=asked.left, add_special=asked.special, instruction=asked.instruction,
            role=asked.prompt_name, room=self.model.limits.max_model_len,
        )  # fmt: skip

    def _keep(self, limits: ModelLimits) -> int | None:
        keep = self.asked.keep
        if keep is not None and keep > limits.max_model_len:
            message = f"must be at most {limits.max_model_len}, this model's context, got {keep}"
            raise InvalidParams([Problem("truncate_prompt_tokens", message)])
        return limits.max_model_len if keep == -1 else keep

    def _prompt(self) -> tuple[str, int]:
        """The prompt that precedes each text, and how many of its tokens mean pooling may leave out."""
        own, name = self.model.text.reading, self.asked.prompt_name
        if own.late is not None:
            own.late.check_role(name)
            return "", 0
        if name is not None and name not in own.prompts:
            known = ", ".join(sorted(own.prompts)) or "none"
            raise InvalidParams([Problem("prompt_name", f"this model has {known}, not {name[:64]!a}")])
        prompt = own.prompts[name or own.default_prompt] if name or own.default_prompt else ""
        if not prompt or not self.asked.special:
            return prompt, 0
        return prompt, len(reading.encode(self.model.text.tokenizer, prompt, None, keep=None).token_ids) - 1

    def _check_output(self) -> None:
        if self.model.text.reading.late is not None and self.asked.pooling.output == EMBED:
            message = f"{self.model.name!r} makes a vector of each token: use /pooling, /score or /rerank"
            raise InvalidParams([Problem("model", message)])

    def _check_dimensions(self) -> None:
        wanted, known = self.asked.pooling.dimensions, self.model.text.reading.dimensions
        if not wanted:
            return
        if known is None:
            raise InvalidParams([Problem("dimensions", "this model was not trained for shorter vectors")])
        if known and wanted not in known:
            sizes = ", ".join(map(str, known))
            raise InvalidParams([Problem("dimensions", f"this model has {sizes}, not {wanted}")])

    def _check_length(self, tokens: Tokens, limits: ModelLimits, index: int | None) -> None:
        if len(tokens.token_ids) > limits.max_model_len:
            param = self.asked.param if index is None else f"{self.asked.param}[{index}]"
            raise too_long(limits.max_model_len, len(tokens.token_ids), 0, param)

    def _record(self, tokens: Tokens, skip: int) -> RequestRecord:
        params = self.asked.pooling
        skip = skip if skip < len(tokens.token_ids) else 0
        asked = replace(params, second_start=tokens.second_start, unseen=tokens.unseen, skip=skip)
        return RequestRecord(
            request_id=secrets.token_hex(16),
            prompt_token_ids=tokens.token_ids,
            task=Pool(pooling=asked),
            priority=self.asked.priority,
            **origin_of(self.caller, self.asked.cache_salt)._asdict(),
        )


async def _checked(reader: Reader, text: str | Pair) -> int:
    """Its number of characters. Raises PagodaError for a text that is certainly too long, before tokenising it."""
    parts = [text] if isinstance(text, str) else list(text)
    for part in parts:
        await reader.check(part)
    return sum(map(len, parts))


def _prefixed(prompt: str, text: str | Pair) -> str | Pair:
    return prompt + text if isinstance(text, str) else text


def held_bytes(records: Sequence[RequestRecord], width: int) -> int:
    """Memory held for a body and its answer, in bytes."""
    tokens = sum(len(record.prompt_token_ids) for record in records)
    vectors = tokens if any(_of_tokens(record) for record in records) else len(records)
    return tokens * BYTES_PER_TOKEN + vectors * width * BYTES_PER_NUMBER


def _of_tokens(record: RequestRecord) -> bool:
    return isinstance(record.task, Pool) and record.task.pooling.output == TOKEN_EMBED
