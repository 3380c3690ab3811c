"""POST /v1/completions: prompts of text or token ids in, n continuations of each out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.answer import Answer, Part, Update
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.logprobs import CompletionLogprobs, joined, prompt_logprobs
from pagoda_gateway.requests import Prompt, completion_records, read_body, shows_no_output
from pagoda_gateway.respond import Head, described, json_response, respond, stream_usage
from pagoda_gateway.schemas import CompletionRequest
from pagoda_gateway.sse import DONE, event
from pagoda_proto.records import FinishReason


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter()

    async def completions(request: Request) -> Response:
        body = await read_body(ctx, request, CompletionRequest)

        async def open_completion() -> _Completion:
            prepared = await completion_records(ctx, body)
            needs_usage = not body.stream or stream_usage(body).at_end
            answer = await Answer.open(ctx, [record for _, record in prepared], needs_usage=needs_usage)
            return _Completion(ctx, body, [prompt for prompt, _ in prepared], answer)

        return await respond(ctx, request, open_completion, stream=bool(body.stream))

    routes.add_api_route(
        "/v1/completions",
        completions,
        methods=["POST"],
        response_model=None,
        tags=["generation"],
        summary="Continue a text",
        openapi_extra=described("/v1/completions", CompletionRequest),
    )
    return routes


@dataclass
class _Choice:
    """What one choice has become so far. `prompt` is what it continues."""

    part: Part
    prompt: Prompt
    logprobs_of: CompletionLogprobs | None
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sum_logprobs: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    begun: bool = False

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / len(self.token_ids) if self.token_ids else -float("inf")


class _Completion:
    """A plain completion in OpenAI's shapes."""

    def __init__(self, ctx: GatewayContext, body: CompletionRequest, prompts: Sequence[Prompt], answer: Answer) -> None:
        self.answer = answer
        self._ctx = ctx
        self._body = body
        self._head = Head.new(ctx, "cmpl-", answer.parts[0].record)
        self._hides_output = shows_no_output(body)
        self._choices = [
            _Choice(part, prompt, self._new_logprobs())
            for part, prompt in zip(answer.parts, prompts, strict=True)
            for _ in part.choices
        ]

    def _new_logprobs(self) -> CompletionLogprobs | None:
        body = self._body
        if body.logprobs is None:
            return None
        return CompletionLogprobs(self._ctx.text, body.logprobs, body.skip_special_tokens)

    # As one object

    async def whole(self) -> Response:
        while updates := await self.answer.next():
            for update in updates:
                choice = self._choices[update.index]
                text, logprobs = self._read(choice, update)
                choice.texts.append(text)
                choice.logprobs += logprobs
        content = self._head.fields("text_completion")
        content["choices"] = [self._choice(i, choice) for i, choice in enumerate(self._best())]
        content["usage"] = self._usage()
        return json_response(content)

    def _best(self) -> list[_Choice]:
        """The n choices of each prompt; with `best_of`, those whose tokens are likeliest on average."""
        n = 1 if self._body.n is None else self._body.n
        best: list[_Choice] = []
        for part in self.answer.parts:
            choices = self._choices[part.first_index : part.first_index + len(part.choices)]
            if len(choices) > n:
                choices = sorted(choices, key=lambda choice: choice.mean_logprob, reverse=True)
            best += choices[:n]
        return best

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        content: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": None if choice.logprobs_of is None else joined(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs(
                self._ctx.text, choice.prompt.token_ids, choice.part.prompt_logprobs, self._body.prompt_logprobs
            )
        if self._body.return_token_ids:
            content["token_ids"] = [] if self._hides_output else choice.token_ids
            content["prompt_token_ids"] = choice.prompt.token_ids
        return content

    # As a stream

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks of all choices that changed, as one piece of bytes per batch."""
        while updates := await self.answer.next():
            data = b"".join(chunk for update in updates for chunk in self._chunks(update))
            if data:
                yield data
        at_end = stream_usage(self._body).at_end
        yield (self._head.usage_event("text_completion", self._usage()) if at_end else b"") + DONE

    def _chunks(self, update: Update) -> Iterator[bytes]:
        choice = self._choices[update.index]
        begins = not choice.begun
        text, logprobs = self._read(choice, update)
        extra: dict[str, Any] = {"logprobs": joined(logprobs)} if logprobs else {}
        if self._body.return_token_ids:
            extra["token_ids"] = [] if self._hides_output else update.delta.token_ids
            if begins:
                extra["prompt_token_ids"] = choice.prompt.token_ids
        if not (text or extra or update.delta.finish_reason):
            return
        content = self._head.fields("text_completion")
        choice_fields = {"index": update.index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
        content["choices"] = [choice_fields | {"stop_reason": choice.stop_reason} | extra]
        usage = stream_usage(self._body)
        if usage.in_chunks:
            content["usage"] = self._usage()
        elif usage.at_end:
            content["usage"] = None
        yield event(content)

    # Both

    def _read(self, choice: _Choice, update: Update) -> tuple[str, list[dict[str, Any]]]:
        """Text and logprobs that the client has not got yet; the first time, the echoed prompt before them."""
        delta = update.delta
        text, logprobs = "", []
        if self._body.echo and not choice.begun:
            text = self._prompt_text(choice.prompt)
            if choice.logprobs_of is not None:
                part = choice.part
                logprobs.append(choice.logprobs_of.prompt(choice.prompt.token_ids, part.prompt_logprobs))
        choice.begun = True
        if not self._hides_output:
            text += delta.text
            if choice.logprobs_of is not None and delta.token_ids:
                logprobs.append(choice.logprobs_of.output(delta.token_ids, delta.logprobs or []))
        choice.token_ids += delta.token_ids
        choice.sum_logprobs += sum(entry.logprob for entry in delta.logprobs or ())
        if delta.finish_reason is not None:
            choice.finish_reason = FinishReason.LENGTH if self._hides_output else delta.finish_reason
            choice.stop_reason = None if self._hides_output else delta.stop_reason
        return text, logprobs

    def _prompt_text(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else self._ctx.text.decode(prompt.token_ids)

    def _usage(self) -> dict[str, Any]:
        usage = self.answer.usage()
        if self._hides_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage
