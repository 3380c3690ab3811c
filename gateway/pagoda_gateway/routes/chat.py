"""POST /v1/chat/completions: one conversation in, n choices of text or tool calls out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.api.answer_schemas import ChatAnswer
from pagoda_gateway.api.described import described
from pagoda_gateway.api.encoding import encoded_list
from pagoda_gateway.api.schemas import ChatRequest
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.answer import Answer, Update
from pagoda_gateway.generation.body import client_of, hold_for, read_body
from pagoda_gateway.generation.logprobs import chat_logprobs, prompt_logprobs
from pagoda_gateway.generation.present import Gathered, Presented
from pagoda_gateway.generation.prompts import tools_in_use
from pagoda_gateway.generation.requests import chat_record, held_bytes
from pagoda_gateway.generation.respond import Head, respond, stream_usage
from pagoda_gateway.text.generation import TextDelta
from pagoda_gateway.text.tools import HermesParser, ToolCall
from pagoda_proto.records import FinishReason, RequestRecord


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter()

    async def chat_completions(request: Request) -> Response:
        body = await read_body(ctx, request, ChatRequest)

        async def open_chat() -> Presented:
            nonlocal body
            record = await chat_record(ctx, body, client_of(request))
            with_tools = tools_in_use(body)
            body = body.model_copy(update={"messages": [], "tools": None, "metadata": None})
            hold_for(request, held_bytes(record.task.params, [len(record.prompt_token_ids)]), instead=True)
            usage = stream_usage(body)
            answer = await Answer.open(ctx, [record], needs_usage=not body.stream or usage.at_end)
            head = Head.new(ctx, "chatcmpl-", record)
            return Presented(answer, _Chat(ctx, body, record, answer, with_tools), head, usage)

        return await respond(ctx, request, open_chat, stream=bool(body.stream))

    routes.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        response_model=None,
        tags=["generation"],
        summary="Continue a conversation",
        openapi_extra=described("/v1/chat/completions", ChatRequest, ChatAnswer),
    )
    return routes


@dataclass
class _Choice:
    """What one choice has become so far. `parser` reads tool calls out of the text, if the request has tools."""

    index: int
    parser: HermesParser | None
    gathered: Gathered = field(default_factory=Gathered)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def read(self, delta: TextDelta) -> tuple[str, list[ToolCall]]:
        """Text and tool calls of a delta; OpenAI's names for its ending."""
        text, calls = delta.text, list[ToolCall]()
        if self.parser is not None:
            events = self.parser.push(delta.text)
            if delta.finish_reason is not None:
                events += self.parser.flush()
            text = "".join(item for item in events if isinstance(item, str))
            calls = [item for item in events if isinstance(item, ToolCall)]
        if delta.finish_reason is not None:
            called = self.parser is not None and self.parser.num_calls > 0
            is_call = called and delta.finish_reason is FinishReason.STOP
            self.finish_reason = "tool_calls" if is_call else delta.finish_reason.value
            self.stop_reason = delta.stop_reason
        return text, calls


class _Chat:
    """The shape of a chat answer."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, ctx: GatewayContext, body: ChatRequest, record: RequestRecord, answer: Answer, with_tools: bool
    ) -> None:
        self._answer = answer
        self._ctx = ctx
        self._body = body
        self._top = body.top_logprobs or 0
        self._record = record
        self._choices = [_Choice(i, HermesParser() if with_tools else None) for i in range(record.task.params.n)]

    def usage(self) -> dict[str, Any]:
        return self._answer.usage()

    # As one object

    def take(self, update: Update) -> None:
        choice = self._choices[update.index]
        text, calls = choice.read(update.delta)
        choice.gathered.add(update.delta)
        choice.gathered.texts[-1] = text
        choice.calls += calls

    async def fields(self) -> dict[str, Any]:
        text, body, record = self._ctx.text, self._body, self._record
        content: dict[str, Any] = {"choices": [await self._choice(choice) for choice in self._choices]}
        if body.prompt_logprobs is not None:
            found = self._answer.parts[0].prompt_logprobs
            entries = prompt_logprobs(text, record.prompt_token_ids, found, body.prompt_logprobs)
            content["prompt_logprobs"] = await encoded_list(entries, 1 + body.prompt_logprobs)
        if body.return_token_ids:
            content["prompt_token_ids"] = record.prompt_token_ids
        return content

    async def _choice(self, choice: _Choice) -> dict[str, Any]:
        gathered = choice.gathered
        text = "".join(gathered.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [self._call(choice, call) for call in choice.calls]
        content = {
            "index": choice.index,
            "message": message,
            "logprobs": await self._logprobs(gathered.token_ids, gathered.logprobs) if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return content | ({"token_ids": gathered.token_ids} if self._body.return_token_ids else {})

    # As a stream

    def opening(self) -> list[dict[str, Any]]:
        prompt = {"prompt_token_ids": self._record.prompt_token_ids} if self._body.return_token_ids else {}
        return [_delta(choice, {"role": "assistant", "content": ""}, **prompt) for choice in self._choices]

    async def chunks(self, update: Update) -> list[dict[str, Any]]:
        choice, delta = self._choices[update.index], update.delta
        text, calls = choice.read(delta)
        extra: dict[str, Any] = {}
        if self._body.logprobs and delta.token_ids:
            extra["logprobs"] = await self._logprobs(delta.token_ids, delta.logprobs or [])
        if self._body.return_token_ids and delta.token_ids:
            extra["token_ids"] = delta.token_ids
        ended = delta.finish_reason is not None
        deltas: list[dict[str, Any]] = []
        if text or (extra and not calls and not ended):
            deltas.append({"content": text})
        for call in calls:
            begun = self._call(choice, call)
            arguments = {"index": call.index, "function": {"arguments": begun["function"]["arguments"]}}
            begun = {"index": call.index, **begun, "function": {**begun["function"], "arguments": ""}}
            deltas += {"tool_calls": [begun]}, {"tool_calls": [arguments]}
        if ended:
            deltas.append({})
        found = [_delta(choice, item) for item in deltas]
        if found:
            found[0] |= extra  # what came along is told once
        if ended:
            found[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return found

    # Both

    async def _logprobs(self, token_ids: list[int], entries: list[Any]) -> dict[str, Any]:
        content = await encoded_list(chat_logprobs(self._ctx.text, token_ids, entries, self._top), 1 + self._top)
        return {"content": content, "refusal": None}

    def _call(self, choice: _Choice, call: ToolCall) -> dict[str, Any]:
        """Its id follows from the request's, so a replayed stream names its calls alike."""
        call_id = f"call_{self._record.request_id[:20]}{choice.index:02x}{call.index:04x}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(choice: _Choice, delta: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
