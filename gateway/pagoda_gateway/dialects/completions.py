"""OpenAI's plain completions: prompts of text or token ids in, n continuations of each out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pagoda_gateway.api.answer_schemas import CompletionAnswer
from pagoda_gateway.api.encoding import encoded_columns
from pagoda_gateway.api.error_body import OPENAI_ERRORS
from pagoda_gateway.api.schemas import CompletionRequest
from pagoda_gateway.clients import NOBODY, Caller, origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects import openai
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.dialects.logprobs import COLUMNS, CompletionLogprobs, Row
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.positions import Marks, units_of
from pagoda_gateway.generation.prompts import at_most, last, text_of
from pagoda_gateway.generation.requests import check_priority, check_products, new_job, new_record
from pagoda_gateway.generation.run import Part, Run
from pagoda_gateway.generation.updates import Gathered, Update
from pagoda_gateway.text.events import Finish
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import MAX_N, SamplingParams
from pagoda_proto.records import FinishReason, RequestRecord
from pagoda_proto.steps import TopLogprobs

DEFAULT_TOKENS = 16


async def completion_records(
    ctx: GatewayContext, body: CompletionRequest, caller: Caller = NOBODY
) -> list[tuple[str | None, RequestRecord]]:
    """One record per prompt, with the client's text, or None if it sent token ids. Special tokens spelled out in the
    text are special tokens, as in vLLM.

    Raises:
        PagodaError: a field asks for something impossible; `param` names it.
    """
    model, shown = ctx.catalogue.find(body.model, caller), openai.shown(body)
    check_priority(ctx.config, model, body.priority)
    params = completion_params(model.text, body)
    reader = openai.reader(ctx, body, caller, "prompt", body.max_tokens)
    prompts = [prompt if isinstance(prompt, str) else last(prompt, reader.keep) for prompt in prompts_of(body)]
    lengths = [0 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    check_products(ctx.config, model, params, lengths, shown)
    at_most("prompt", len(prompts), ctx.config.max_prompts)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    read = iter(await reader.text_ids(texts, body.add_special_tokens))
    found = [(prompt, next(read)) if isinstance(prompt, str) else (None, prompt) for prompt in prompts]
    if reader.keep is not None:
        found = [(None, ids) for _, ids in found]  # a truncated text is known only as tokens
    check_products(ctx.config, model, params, [len(token_ids) for _, token_ids in found], shown)
    origin = origin_of(caller, body.cache_salt)
    return [(text, new_record(model, ids, params, origin, body.priority, body.request_id)) for text, ids in found]


def completion_params(text: ModelText, body: CompletionRequest) -> SamplingParams:
    """With `best_of`, that many choices run, ranked by log-probabilities requested for it. Raises InvalidParams."""
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of > MAX_N:
        raise InvalidParams([Problem("best_of", f"must be at most {MAX_N}, got {body.best_of}")])
    ranked = body.best_of is not None and body.best_of > n
    echoed = body.logprobs if body.echo else None
    asked = [value for value in (body.prompt_logprobs, echoed) if value is not None]
    return openai.params(
        body,
        text,
        n=body.best_of if body.best_of is not None and n >= 1 else n,
        max_tokens=1 if shows_no_output(body) else DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if ranked and body.logprobs is None else body.logprobs,
        prompt_logprobs=max(asked) if asked else None,
    )


def shows_no_output(body: CompletionRequest) -> bool:
    """`max_tokens: 0` with `echo` asks about the prompt only. The engine core then generates one token, not shown."""
    return body.echo and body.max_tokens == 0


def prompts_of(body: CompletionRequest) -> Sequence[Any]:
    """Each a text or a list of token ids. Raises InvalidParams."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidParams([Problem("prompt", "must have at least one prompt")])
    return [given] if isinstance(given[0], int) else given


async def completion_job(ctx: GatewayContext, body: CompletionRequest, caller: Caller) -> Job:
    model = ctx.catalogue.find(body.model, caller)
    prepared = await completion_records(ctx, body, caller)
    echoes: list[str] = []
    for text, record in prepared if body.echo else ():
        if text is None:
            ids = record.prompt_token_ids
            text = await text_of(ctx.pool, model.text, caller.key, ids, skip_special_tokens=True)
        echoes.append(text)
    told = tuple(echoes) if body.echo else None
    shown = openai.shown(body, logprobs=body.logprobs, echoes=told, prompt_only=shows_no_output(body))
    records = [record for _, record in prepared]
    return new_job("cmpl-", model, records, shown, body.request_id)


@dataclass
class _Choice:
    """`echo` is the prompt's text, with which the choice begins, if it is shown."""

    part: Part
    echo: str | None
    rows_of: CompletionLogprobs | None
    begun: bool = False

    def rows(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs], begins: bool) -> Iterator[Row]:
        """Rows of these tokens, preceded by those of the echoed prompt if the choice `begins`."""
        if self.rows_of is None:
            return iter(())
        output = self.rows_of.output(token_ids, entries)
        if not begins or self.echo is None:
            return output
        prompt = self.part.record.prompt_token_ids
        return chain(self.rows_of.prompt(prompt, self.part.prompt_logprobs, self.echo), output)


class CompletionWriter(openai.OpenAIWriter):
    object_name = chunk_name = "text_completion"

    def __init__(self, run: Run, marks: Marks | None = None) -> None:
        super().__init__(run, marks)
        echoes = self.shown.echoes or [None] * len(run.parts)
        self._choices = [
            _Choice(part, echo, self._new_rows(part))
            for part, echo in zip(run.parts, echoes, strict=True)
            for _ in part.choices
        ]

    def _new_rows(self, part: Part) -> CompletionLogprobs | None:
        top, params = self.shown.logprobs, part.record.task.params
        return None if top is None else CompletionLogprobs(self.run.text, top, params.skip_special_tokens)

    def seen(self, update: Update) -> Update:
        if not self.shown.prompt_only:
            return update
        return Update(update.choice, [], None, [Finish(FinishReason.LENGTH)] if update.finish is not None else [])

    async def fields(self) -> dict[str, Any]:
        return {"choices": [await self._choice(index, choice) for index, choice in enumerate(self._best())]}

    def _best(self) -> list[int]:
        """The n choices of each prompt; with `best_of`, those with the highest mean log-probability."""
        n, best = self.shown.n, list[int]()
        for part in self.run.parts:
            choices = [choice.index for choice in part.choices]
            if len(choices) > n:
                choices.sort(key=lambda choice: _mean_logprob(self.gathered[choice]), reverse=True)
            best += choices[:n]
        return best

    async def _choice(self, index: int, ran_as: int) -> dict[str, Any]:
        choice, gathered = self._choices[ran_as], self.gathered[ran_as]
        content: dict[str, Any] = {
            "index": index,
            "text": (choice.echo or "") + "".join(gathered.texts),
            "logprobs": await self._logprobs(choice.rows(gathered.token_ids, gathered.logprobs, begins=True)),
            **openai.ending(gathered.finish),
            **await self.prompt_logprobs(choice.part),
        }
        if self.shown.token_ids:
            content |= {"token_ids": gathered.token_ids, "prompt_token_ids": choice.part.record.prompt_token_ids}
        return content

    def pass_over(self, update: Update) -> None:
        choice = self._choices[update.choice]
        if not self.known_to_begin[update.choice]:
            return
        begins, choice.begun = not choice.begun, True
        for _ in choice.rows(update.token_ids, update.logprobs or [], begins):
            pass  # advances the text offset

    async def chunks(self, update: Update) -> list[openai.Chunk]:
        choice, token_ids = self._choices[update.choice], update.token_ids
        begins = not choice.begun
        text = ((choice.echo or "") if begins else "") + update.text
        content: dict[str, Any] = {
            "index": update.choice,
            "text": text,
            "logprobs": None,
            **openai.ending(update.finish),
        }
        if self.shown.logprobs is not None and (token_ids or (begins and choice.echo is not None)):
            content["logprobs"] = await self._logprobs(choice.rows(token_ids, update.logprobs or [], begins))
        says_ids = self.shown.token_ids and (token_ids or begins)
        if not (text or content["logprobs"] or update.finish or says_ids):
            return []
        choice.begun = True
        if self.shown.token_ids:
            content["token_ids"] = token_ids
            if begins:
                content["prompt_token_ids"] = choice.part.record.prompt_token_ids
        return [openai.Chunk(content, sum(map(units_of, update.events)) + begins * openai.BEGINNING)]

    async def _logprobs(self, rows: Iterator[Row]) -> dict[str, Any] | None:
        top = self.shown.logprobs
        return None if top is None else await encoded_columns(rows, COLUMNS, 2 + top)


def _mean_logprob(gathered: Gathered) -> float:
    entries = gathered.logprobs
    return sum(entry.logprob for entry in entries) / len(entries) if entries else -float("inf")


COMPLETIONS = Dialect(
    name="completions",
    path="/v1/completions",
    summary="Continue a text",
    body=CompletionRequest,
    answer=CompletionAnswer,
    job=completion_job,
    writer=lambda ctx, run, marks: CompletionWriter(run, marks),
    error=OPENAI_ERRORS,
)
