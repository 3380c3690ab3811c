"""POST /v1/chat/completions: one conversation in, n choices of text or tool calls out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagoda_gateway.answer import Answer, Update
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.logprobs import chat_logprobs, prompt_logprobs
from pagoda_gateway.requests import chat_record, read_body, tools_in_use
from pagoda_gateway.respond import Head, described, json_response, respond, stream_usage
from pagoda_gateway.schemas import ChatRequest
from pagoda_gateway.sse import DONE, event
from pagoda_gateway.text.tools import HermesParser, ToolCall
from pagoda_proto.records import FinishReason, RequestRecord


def router(ctx: GatewayContext) -> APIRouter:
    routes = APIRouter()

    async def chat_completions(request: Request) -> Response:
        body = await read_body(ctx, request, ChatRequest)

        async def open_chat() -> _Chat:
            record = await chat_record(ctx, body)
            needs_usage = not body.stream or stream_usage(body).at_end
            answer = await Answer.open(ctx, [record], needs_usage=needs_usage)
            return _Chat(ctx, body, record, answer)

        return await respond(ctx, request, open_chat, stream=bool(body.stream))

    routes.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        response_model=None,
        tags=["generation"],
        summary="Continue a conversation",
        openapi_extra=described("/v1/chat/completions", ChatRequest),
    )
    return routes


@dataclass
class _Choice:
    """What one choice has become so far. `parser` reads tool calls out of the text, if the request has tools."""

    index: int
    parser: HermesParser | None
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class _News:
    """What one update means to the client."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class _Chat:
    """A chat answer in OpenAI's shapes."""

    def __init__(self, ctx: GatewayContext, body: ChatRequest, record: RequestRecord, answer: Answer) -> None:
        self.answer = answer
        self._ctx = ctx
        self._body = body
        self._record = record
        self._head = Head.new(ctx, "chatcmpl-", record)
        with_tools = tools_in_use(body)
        self._choices = [_Choice(i, HermesParser() if with_tools else None) for i in range(record.params.n)]

    # As one object

    async def whole(self) -> Response:
        while updates := await self.answer.next():
            for update in updates:
                choice = self._choices[update.index]
                news = self._read(choice, update)
                choice.texts.append(news.text)
                choice.calls += news.calls
                choice.logprobs += news.logprobs
                choice.token_ids += update.delta.token_ids
        content = self._head.fields("chat.completion")
        content["choices"] = [self._choice(choice) for choice in self._choices]
        content["usage"] = self.answer.usage()
        if self._body.prompt_logprobs is not None:
            part = self.answer.parts[0]
            content["prompt_logprobs"] = prompt_logprobs(
                self._ctx.text, self._record.prompt_token_ids, part.prompt_logprobs, self._body.prompt_logprobs
            )
        if self._body.return_token_ids:
            content["prompt_token_ids"] = self._record.prompt_token_ids
        return json_response(content)

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [self._call(choice, call) for call in choice.calls]
        content = {
            "index": choice.index,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return content | ({"token_ids": choice.token_ids} if self._body.return_token_ids else {})

    # As a stream

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks of all choices that changed, as one piece of bytes per batch."""
        usage = stream_usage(self._body)
        opening = b"".join(self._opening(choice) for choice in self._choices)
        while updates := await self.answer.next():
            data = b"".join(chunk for update in updates for chunk in self._chunks(update))
            if data:
                yield opening + data
                opening = b""
        closing = self._head.usage_event("chat.completion.chunk", self.answer.usage()) if usage.at_end else b""
        yield opening + closing + DONE

    def _chunks(self, update: Update) -> Iterator[bytes]:
        choice = self._choices[update.index]
        news = self._read(choice, update)
        extra: dict[str, Any] = {}
        if news.logprobs:
            extra["logprobs"] = {"content": news.logprobs, "refusal": None}
        if self._body.return_token_ids and update.delta.token_ids:
            extra["token_ids"] = update.delta.token_ids
        ended = update.delta.finish_reason is not None
        if news.text or (extra and not news.calls and not ended):
            yield self._chunk(choice, {"content": news.text}, **extra)
            extra = {}
        for call in news.calls:
            begun = self._call(choice, call)
            arguments = {"index": call.index, "function": {"arguments": begun["function"]["arguments"]}}
            begun = {"index": call.index, **begun, "function": {**begun["function"], "arguments": ""}}
            yield self._chunk(choice, {"tool_calls": [begun]}, **extra)
            yield self._chunk(choice, {"tool_calls": [arguments]})
            extra = {}
        if ended:
            yield self._chunk(choice, {}, **extra, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)

    def _opening(self, choice: _Choice) -> bytes:
        prompt = {"prompt_token_ids": self._record.prompt_token_ids} if self._body.return_token_ids else {}
        return self._chunk(choice, {"role": "assistant", "content": ""}, **prompt)

    def _chunk(self, choice: _Choice, delta: dict[str, Any], **extra: Any) -> bytes:
        content = self._head.fields("chat.completion.chunk")
        content["choices"] = [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}]
        usage = stream_usage(self._body)
        if usage.in_chunks:
            content["usage"] = self.answer.usage()
        elif usage.at_end:
            content["usage"] = None
        return event(content)

    # Both

    def _read(self, choice: _Choice, update: Update) -> _News:
        """Take an update in: tool calls out of its text, OpenAI's names for its ending."""
        delta = update.delta
        news = _News()
        if choice.parser is None:
            news.text = delta.text
        else:
            events = choice.parser.push(delta.text)
            if delta.finish_reason is not None:
                events += choice.parser.flush()
            news.text = "".join(item for item in events if isinstance(item, str))
            news.calls = [item for item in events if isinstance(item, ToolCall)]
        if self._body.logprobs and delta.token_ids:
            top = self._body.top_logprobs or 0
            news.logprobs = chat_logprobs(self._ctx.text, delta.token_ids, delta.logprobs or [], top)
        if delta.finish_reason is not None:
            called = choice.parser is not None and choice.parser.num_calls > 0
            is_call = called and delta.finish_reason is FinishReason.STOP
            choice.finish_reason = "tool_calls" if is_call else delta.finish_reason.value
            choice.stop_reason = delta.stop_reason
        return news

    def _call(self, choice: _Choice, call: ToolCall) -> dict[str, Any]:
        """Its id follows from the request's, so a replayed stream names its calls alike."""
        call_id = f"call_{self._record.request_id[:20]}{choice.index:02x}{call.index:04x}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
