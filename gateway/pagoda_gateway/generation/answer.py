"""One HTTP request, several generations, one sequence of updates: token deltas in, text deltas of choices out.

The choices of all prompts are numbered through: choice i of prompt p has index p * n + i. Nothing runs ahead of the
reader: while it does not ask, the engine client merges what arrives, so a slow client costs no memory here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagoda_gateway.context import GatewayContext
from pagoda_gateway.engine.interface import EngineClient, Generation
from pagoda_gateway.text.generation import ChoiceText, TextDelta
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, FinishReason, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs


@dataclass(slots=True)
class Update:
    """New text of the choice with this index."""

    index: int
    delta: TextDelta


@dataclass
class Part:
    """One prompt's generation and the texts of its choices. Owned by its Answer."""

    record: RequestRecord
    generation: Generation
    first_index: int
    choices: list[ChoiceText]
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    async def updates(self) -> list[Update]:
        """What came since the last call; [] once the engine core has ended the request.

        Raises:
            PagodaError: the generation failed, or ended before all of its choices did.
        """
        deltas = await self.generation.next()
        if not deltas and not self.finished:
            raise PagodaError(ErrorCode.STREAM_INTERRUPTED, "the generation ended early", retry_after_s=1.0)
        updates = [self._take(delta) for delta in deltas]
        await self._abort_stopped(deltas)
        return updates

    def _take(self, delta: Delta) -> Update:
        self.usage = delta.usage or self.usage
        self.prompt_logprobs += delta.result.prompt_logprobs or ()
        choice = self.choices[delta.choice]
        if not choice.finished and delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise PagodaError(
                delta.error_code or ErrorCode.STREAM_INTERRUPTED, delta.error_message or "the request was aborted"
            )
        tokens = delta.result
        text = choice.push(tokens.token_ids, tokens.logprobs, delta.finish_reason, tokens.stop_token_id)
        return Update(self.first_index + delta.choice, text)

    async def _abort_stopped(self, deltas: Sequence[Delta]) -> None:
        """Choices that a stop string just ended still run in the engine core."""
        running = {delta.choice for delta in deltas if delta.finish_reason is None}
        stopped = sorted(i for i in running if self.choices[i].finished)
        if stopped:
            await self.generation.abort(stopped)


class Answer:
    """All choices of a request. `open` it, read `next` until it gives [], and `aclose` it in any case."""

    def __init__(self, parts: list[Part], needs_usage: bool) -> None:
        self.parts = parts
        self._needs_usage = needs_usage
        self._queue: asyncio.Queue[list[Update] | Exception | None] = asyncio.Queue(maxsize=len(parts))
        self._pumps: list[asyncio.Task[None]] = []
        self._num_open = len(parts)
        self._num_unfinished = sum(len(part.choices) for part in parts)

    @staticmethod
    async def open(ctx: GatewayContext, records: Sequence[RequestRecord], *, needs_usage: bool) -> Answer:
        """Submit all records, or none.

        Args:
            needs_usage: Read on to the engine core's own ending, which tells about cached tokens.

        Raises:
            PagodaError: one of them was not admitted.
        """
        generations = await _submit_all(ctx.engine, records)
        parts: list[Part] = []
        first_index = 0
        for record, generation in zip(records, generations, strict=True):
            choices = new_choices(ctx.text, record)
            parts.append(Part(record, generation, first_index, choices))
            first_index += len(choices)
        return Answer(parts, needs_usage)

    async def next(self) -> list[Update]:
        """Updates of one or more choices, all that are there; [] when every choice has ended.

        Raises:
            PagodaError: a generation failed; the others are still to be closed.
        """
        if not (self._num_unfinished or self._needs_usage):
            return []
        updates = await (self.parts[0].updates() if len(self.parts) == 1 else self._next_of_many())
        self._num_unfinished -= sum(update.delta.finish_reason is not None for update in updates)
        return updates

    async def _next_of_many(self) -> list[Update]:
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(part)) for part in self.parts]
        updates: list[Update] = []
        while self._num_open and (not updates or not self._queue.empty()):
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                self._num_open -= 1
            else:
                updates += item
        return updates

    async def _pump(self, part: Part) -> None:
        try:
            while updates := await part.updates():
                await self._queue.put(updates)
        except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
            await self._queue.put(error)
        else:
            await self._queue.put(None)

    async def aclose(self) -> None:
        """Abort what still runs. Safe to call twice."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for part in self.parts:
            await part.generation.aclose()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, of what was generated so far."""
        num_prompt = sum(len(part.record.prompt_token_ids) for part in self.parts)
        num_output = sum(choice.num_tokens for part in self.parts for choice in part.choices)
        num_cached = sum(part.usage.cached_prompt_tokens for part in self.parts if part.usage is not None)
        return usage_object(num_prompt, num_output, num_cached)


def usage_object(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def new_choices(text: ModelText, record: RequestRecord) -> list[ChoiceText]:
    return [ChoiceText(text, record.task.params) for _ in range(record.task.params.n)]


async def _submit_all(engine: EngineClient, records: Sequence[RequestRecord]) -> list[Generation]:
    tasks = [asyncio.create_task(engine.submit(record)) for record in records]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                await outcome.aclose()
        raise
