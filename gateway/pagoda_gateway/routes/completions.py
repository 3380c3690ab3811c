"""POST /v1/completions: prompts of text or token ids in, n continuations of each out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.answer_schemas import CompletionAnswer
from pagoda_gateway.api.described import described
from pagoda_gateway.api.encoding import encoded_columns, encoded_list
from pagoda_gateway.api.schemas import CompletionRequest
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.answer import Answer, Part, Update
from pagoda_gateway.generation.body import client_of, hold_for, read_body
from pagoda_gateway.generation.logprobs import COLUMNS, CompletionLogprobs, Row, prompt_logprobs
from pagoda_gateway.generation.present import Gathered, Presented
from pagoda_gateway.generation.prompts import Prompt
from pagoda_gateway.generation.requests import completion_records, held_bytes
from pagoda_gateway.generation.respond import Head, respond, stream_usage
from pagoda_gateway.generation.sampling import shows_no_output
from pagoda_proto.records import FinishReason
from pagoda_proto.steps import TopLogprobs


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter()

    async def completions(request: Request) -> Response:
        body = await read_body(ctx, request, CompletionRequest)

        async def open_completion() -> Presented:
            nonlocal body
            prepared = await completion_records(ctx, body, client_of(request))
            body = body.model_copy(update={"prompt": ""})
            prompts, records = [prompt for prompt, _ in prepared], [record for _, record in prepared]
            lengths = [len(prompt.token_ids) for prompt in prompts]
            hold_for(request, held_bytes(records[0].task.params, lengths), instead=True)
            usage = stream_usage(body)
            answer = await Answer.open(ctx, records, needs_usage=not body.stream or usage.at_end)
            return Presented(answer, _Completion(ctx, body, prompts, answer), Head.new(ctx, "cmpl-", records[0]), usage)

        return await respond(ctx, request, open_completion, stream=bool(body.stream))

    routes.add_api_route(
        "/v1/completions",
        completions,
        methods=["POST"],
        response_model=None,
        tags=["generation"],
        summary="Continue a text",
        openapi_extra=described("/v1/completions", CompletionRequest, CompletionAnswer),
    )
    return routes


@dataclass
class _Choice:
    """What one choice has become so far. `prompt` is what it continues, `echo` how that is shown, if it is."""

    part: Part
    prompt: Prompt
    echo: str | None
    rows_of: CompletionLogprobs | None
    gathered: Gathered = field(default_factory=Gathered)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    begun: bool = False

    @property
    def mean_logprob(self) -> float:
        entries = self.gathered.logprobs
        return sum(entry.logprob for entry in entries) / len(entries) if entries else -float("inf")

    def rows(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs], begins: bool) -> Iterator[Row]:
        """Of these tokens; of the echoed prompt before them where the choice begins."""
        if self.rows_of is None:
            return iter(())
        output = self.rows_of.output(token_ids, entries)
        if not begins or self.echo is None:
            return output
        return chain(self.rows_of.prompt(self.prompt.token_ids, self.part.prompt_logprobs, self.echo), output)


class _Completion:
    """The shape of a plain completion."""

    object_name = chunk_name = "text_completion"

    def __init__(self, ctx: GatewayContext, body: CompletionRequest, prompts: Sequence[Prompt], answer: Answer) -> None:
        self._answer = answer
        self._ctx = ctx
        self._body = body
        self._hides_output = shows_no_output(body)
        self._choices = [
            _Choice(part, prompt, self._echo(prompt) if body.echo else None, self._new_rows())
            for part, prompt in zip(answer.parts, prompts, strict=True)
            for _ in part.choices
        ]

    def _echo(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else self._ctx.text.decode(prompt.token_ids)

    def _new_rows(self) -> CompletionLogprobs | None:
        body = self._body
        if body.logprobs is None:
            return None
        return CompletionLogprobs(self._ctx.text, body.logprobs, body.skip_special_tokens)

    def usage(self) -> dict[str, Any]:
        usage = self._answer.usage()
        if self._hides_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    # As one object

    def take(self, update: Update) -> None:
        choice = self._choices[update.index]
        choice.gathered.add(update.delta)
        self._end(choice, update)

    async def fields(self) -> dict[str, Any]:
        return {"choices": [await self._choice(i, choice) for i, choice in enumerate(self._best())]}

    def _best(self) -> list[_Choice]:
        """The n choices of each prompt; with `best_of`, those whose tokens are likeliest on average."""
        n = 1 if self._body.n is None else self._body.n
        best: list[_Choice] = []
        for part in self._answer.parts:
            choices = self._choices[part.first_index : part.first_index + len(part.choices)]
            if len(choices) > n:
                choices = sorted(choices, key=lambda choice: choice.mean_logprob, reverse=True)
            best += choices[:n]
        return best

    async def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        shown = Gathered() if self._hides_output else choice.gathered
        content: dict[str, Any] = {
            "index": index,
            "text": (choice.echo or "") + "".join(shown.texts),
            "logprobs": await self._logprobs(choice.rows(shown.token_ids, shown.logprobs, begins=True)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        top = self._body.prompt_logprobs
        if top is not None:
            entries = prompt_logprobs(self._ctx.text, choice.prompt.token_ids, choice.part.prompt_logprobs, top)
            content["prompt_logprobs"] = await encoded_list(entries, 1 + top)
        if self._body.return_token_ids:
            content["token_ids"] = shown.token_ids
            content["prompt_token_ids"] = choice.prompt.token_ids
        return content

    # As a stream

    def opening(self) -> list[dict[str, Any]]:
        return []

    async def chunks(self, update: Update) -> list[dict[str, Any]]:
        choice, delta = self._choices[update.index], update.delta
        begins, choice.begun = not choice.begun, True
        self._end(choice, update)
        text = (choice.echo or "") if begins else ""
        token_ids: list[int] = []
        entries: list[TopLogprobs] = []
        if not self._hides_output:
            text += delta.text
            token_ids, entries = delta.token_ids, delta.logprobs or []
        if not (text or token_ids or begins or delta.finish_reason):
            return []
        content = {"index": update.index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
        content["stop_reason"] = choice.stop_reason
        if token_ids or (begins and choice.echo is not None):
            content["logprobs"] = await self._logprobs(choice.rows(token_ids, entries, begins))
        if self._body.return_token_ids:
            content["token_ids"] = token_ids
            if begins:
                content["prompt_token_ids"] = choice.prompt.token_ids
        elif not (text or content["logprobs"] or delta.finish_reason):
            return []
        return [content]

    # Both

    async def _logprobs(self, rows: Iterator[Row]) -> dict[str, Any] | None:
        top = self._body.logprobs
        return None if top is None else await encoded_columns(rows, COLUMNS, 2 + top)

    def _end(self, choice: _Choice, update: Update) -> None:
        if update.delta.finish_reason is not None:
            choice.finish_reason = FinishReason.LENGTH if self._hides_output else update.delta.finish_reason
            choice.stop_reason = None if self._hides_output else update.delta.stop_reason
