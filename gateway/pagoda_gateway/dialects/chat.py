"""OpenAI's chat: one conversation in, n choices of text or tool calls out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagoda_gateway.api.answer_schemas import ChatAnswer
from pagoda_gateway.api.encoding import encoded_list
from pagoda_gateway.api.error_body import OPENAI_ERRORS
from pagoda_gateway.api.schemas import ChatRequest, TokenizeRequest
from pagoda_gateway.clients import NOBODY, Caller, salt_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects import openai
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.dialects.logprobs import chat_logprobs
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.prompts import Reader, work_size
from pagoda_gateway.generation.requests import (
    check_priority,
    check_products,
    named_as_in_body,
    new_job,
    new_record,
)
from pagoda_gateway.generation.updates import Gathered, Update
from pagoda_gateway.text.conversation import Chat, turns_of
from pagoda_gateway.text.events import CallArguments, CallBegun
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.records import RequestRecord
from pagoda_proto.steps import TopLogprobs


async def chat_record(ctx: GatewayContext, body: ChatRequest, caller: Caller = NOBODY) -> RequestRecord:
    """The record of a chat request.

    Raises:
        PagodaError: something about it cannot be done; `param` names the field.
    """
    model = ctx.catalogue.find(body.model, caller)
    check_priority(ctx.config, model, body.priority)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with named_as_in_body({"prompt": "messages", "max_tokens": name}):
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        n = 1 if body.n is None else body.n
        params = openai.params(body, model.text, n=n, max_tokens=max_tokens, logprobs=logprobs)
        reader = Reader(ctx.pool, model, caller.key, "messages", params.max_tokens)
        token_ids = await chat_ids(reader, body)
        check_products(ctx.config, model, params, [len(token_ids)], openai.shown(body))
        return new_record(model, token_ids, params, salt_of(caller, body.cache_salt), body.priority)


def tools_in_use(body: ChatRequest | TokenizeRequest) -> bool:
    return bool(body.tools) and getattr(body, "tool_choice", None) != "none"


async def chat_ids(reader: Reader, body: ChatRequest | TokenizeRequest, add_special_tokens: bool = False) -> list[int]:
    """Token ids of the body's conversation. Raises PagodaError."""

    def read() -> Chat:
        drop = {"function": {"strict"}}
        used = body.tools if body.tools and tools_in_use(body) else ()
        tools = [tool.model_dump(exclude_none=True, exclude=drop) for tool in used]
        return Chat(
            turns=turns_of([message.model_dump(exclude_none=True) for message in body.messages or ()]),
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            options=template_options(body, reader.model.text.template(bool(tools)).variables),
        )

    size = work_size([body.messages, body.tools, body.chat_template_kwargs])
    return await reader.chat_ids(size, read, add_special_tokens)


def template_options(body: ChatRequest | TokenizeRequest, read: frozenset[str]) -> dict[str, Any]:
    """What the template reads besides the messages. Some of it has fields of its own in OpenAI's API.

    Raises:
        InvalidParams: the same thing is said twice, or the template does not read it.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity"):
        value = getattr(body, name, None)
        if value is None:
            continue
        if name not in read:
            raise InvalidParams([Problem(name, f"is {value[:64]!a}, but this model's chat template does not read it")])
        if name in kwargs:
            raise InvalidParams([Problem(name, "is also in chat_template_kwargs; give it once")])
        kwargs[name] = value
    return kwargs


async def chat_job(ctx: GatewayContext, body: ChatRequest, caller: Caller) -> Job:
    record = await chat_record(ctx, body, caller)
    shown = openai.shown(body, tools=tools_in_use(body), logprobs=record.task.params.logprobs)
    return new_job("chatcmpl-", ctx.catalogue.find(body.model, caller), [record], shown)


class ChatWriter(openai.OpenAIWriter):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    async def fields(self) -> dict[str, Any]:
        choices = [await self._choice(i, gathered) for i, gathered in enumerate(self.gathered)]
        (part,) = self.run.parts
        prompt = {"prompt_token_ids": part.record.prompt_token_ids} if self.shown.token_ids else {}
        return {"choices": choices} | await self.prompt_logprobs(part) | prompt

    async def _choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        text = "".join(gathered.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if gathered.calls:
            message["content"] = text or None
            message["tool_calls"] = [self._call(index, i, *call) for i, call in enumerate(gathered.calls)]
        content = {
            "index": index,
            "message": message,
            "logprobs": await self._logprobs(gathered.token_ids, gathered.logprobs),
            **openai.ending(gathered.finish),
        }
        return content | ({"token_ids": gathered.token_ids} if self.shown.token_ids else {})

    def opening(self) -> list[dict[str, Any]]:
        record = self.run.job.records[0]
        prompt = {"prompt_token_ids": record.prompt_token_ids} if self.shown.token_ids else {}
        return [_delta(i, {"role": "assistant", "content": ""}, **prompt) for i in range(record.task.params.n)]

    async def chunks(self, update: Update) -> list[dict[str, Any]]:
        """What came along with the text is told once, in the first of them."""
        extra: dict[str, Any] = {}
        if update.token_ids and self.shown.logprobs is not None:
            extra["logprobs"] = await self._logprobs(update.token_ids, update.logprobs or [])
        if update.token_ids and self.shown.token_ids:
            extra["token_ids"] = update.token_ids
        text, finish = update.text, update.finish
        deltas: list[dict[str, Any]] = [{"content": text}] if text or (extra and not update.events) else []
        deltas += [{"tool_calls": [call]} for call in self._calls(update)]
        if finish is not None:
            deltas.append({})
        found = [_delta(update.choice, delta) for delta in deltas]
        if found and extra:
            found[0] |= extra
        if finish is not None:
            found[-1] |= openai.ending(finish)
        return found

    def _calls(self, update: Update) -> Iterator[dict[str, Any]]:
        for event in update.events:
            if isinstance(event, CallBegun):
                yield {"index": event.index, **self._call(update.choice, event.index, event.name, "")}
            elif isinstance(event, CallArguments):
                yield {"index": event.index, "function": {"arguments": event.text}}

    def _call(self, choice: int, index: int, name: str, arguments: str) -> dict[str, Any]:
        """Its id follows from the request's, so a replayed stream names its calls alike."""
        call_id = f"call_{self.run.job.records[0].request_id[:20]}{choice:02x}{index:04x}"
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    async def _logprobs(self, token_ids: list[int], entries: list[TopLogprobs]) -> dict[str, Any] | None:
        top = self.shown.logprobs
        if top is None:
            return None
        content = await encoded_list(chat_logprobs(self.run.text, token_ids, entries, top), 1 + top)
        return {"content": content, "refusal": None}


def _delta(choice: int, delta: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **extra}


CHAT = Dialect(
    name="chat_completions",
    path="/v1/chat/completions",
    summary="Continue a conversation",
    body=ChatRequest,
    answer=ChatAnswer,
    job=chat_job,
    writer=lambda ctx, run: ChatWriter(run),
    error=OPENAI_ERRORS,
)
