"""OpenAI's chat: one conversation in, n choices of text or tool calls out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pagoda_gateway.api.answer_schemas import ChatAnswer
from pagoda_gateway.api.encoding import encoded_list
from pagoda_gateway.api.error_body import OPENAI_ERRORS
from pagoda_gateway.api.schemas import ChatRequest, TokenizeRequest
from pagoda_gateway.api.tools import NONE, chosen_mode
from pagoda_gateway.clients import Caller, origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects import openai
from pagoda_gateway.dialects.chat_tools import place_in, wanted_of
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.dialects.logprobs import chat_logprobs
from pagoda_gateway.generation.answers import Plan
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.positions import units_of
from pagoda_gateway.generation.prompts import ChatPrompt, Reader, work_size
from pagoda_gateway.generation.requests import (
    check_priority,
    check_products,
    named_as_in_body,
    new_job,
    new_record,
)
from pagoda_gateway.generation.updates import Gathered, Update
from pagoda_gateway.text.conversation import Chat, turns_of
from pagoda_gateway.text.events import CallArguments, CallBegun, Text, Thought
from pagoda_proto.records import RequestRecord
from pagoda_proto.steps import TopLogprobs


async def _planned(ctx: GatewayContext, body: ChatRequest, caller: Caller) -> tuple[RequestRecord, Plan]:
    """The record of a chat request, and the plan of its answer.

    Raises:
        PagodaError: a field asks for something impossible; `param` names it.
    """
    model = ctx.catalogue.find(body.model, caller)
    check_priority(ctx.config, model, body.priority)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with named_as_in_body({"prompt": "messages", "max_tokens": name}):
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        n = 1 if body.n is None else body.n
        params = openai.params(body, model.text, n=n, max_tokens=max_tokens, logprobs=logprobs)
        wanted = wanted_of(body, model.text.formats, params.grammar)
        reader = openai.reader(ctx, body, caller, "messages", params.max_tokens)
        token_ids, thinking = await chat_prompt(reader, body)
        check_products(ctx.config, model, params, [len(token_ids)], openai.shown(body))
    plan = await reader.plan(work_size(body.tools), wanted, thinking, place_in(body))
    with named_as_in_body({"prompt": "messages", "max_tokens": name, "grammar": form_field(body)}):
        params = msgspec.structs.replace(params, grammar=plan.grammar)
        origin = origin_of(caller, body.cache_salt)
        return new_record(model, token_ids, params, origin, body.priority, body.request_id), plan


def form_field(body: ChatRequest) -> str:
    """The field that asks for a grammar."""
    if body.tools and chosen_mode(body.tool_choice) != NONE:
        return "tools"
    return "thinking_budget" if body.form is None else body.form.field


async def chat_ids(reader: Reader, body: ChatRequest | TokenizeRequest, add_special_tokens: bool = False) -> list[int]:
    """Token ids of the body's conversation. Raises PagodaError."""
    return (await chat_prompt(reader, body, add_special_tokens)).token_ids


async def chat_prompt(
    reader: Reader, body: ChatRequest | TokenizeRequest, add_special_tokens: bool = False
) -> ChatPrompt:
    """The body's conversation as a prompt. Raises PagodaError."""

    def read() -> Chat:
        drop = {"function": {"strict"}}
        used = body.tools if body.tools and getattr(body, "tool_choice", None) != NONE else ()
        tools = [tool.model_dump(exclude_none=True, exclude=drop) for tool in used]
        return Chat(
            turns=turns_of([message.model_dump(exclude_none=True) for message in body.messages or ()]),
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            options=openai.template_options(
                body.chat_template_kwargs,
                [(name, name, getattr(body, name, None)) for name in ("reasoning_effort", "verbosity")],
                reader.model.text.template(bool(tools)).variables,
            ),
        )

    size = work_size([body.messages, body.tools, body.chat_template_kwargs])
    return await reader.chat(size, read, add_special_tokens)


async def chat_job(ctx: GatewayContext, body: ChatRequest, caller: Caller) -> Job:
    """Raises PagodaError."""
    record, plan = await _planned(ctx, body, caller)
    echoes = (echoed(body),) if body.echo else None
    shown = openai.shown(
        body,
        form_field=form_field(body),
        how=plan.how,
        logprobs=record.task.params.logprobs,
        echoes=echoes,
        thoughts=body.include_reasoning,
    )
    model = ctx.catalogue.find(body.model, caller)
    return new_job("chatcmpl-", model, [record], shown, body.request_id, loose_grammar=plan.loose_grammar)


def echoed(body: ChatRequest) -> str:
    """The text to echo: the last message if it is the assistant's, which the answer continues; otherwise ""."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)


class ChatWriter(openai.OpenAIWriter):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    async def fields(self) -> dict[str, Any]:
        choices = [await self._choice(i, gathered) for i, gathered in enumerate(self.gathered)]
        (part,) = self.run.parts
        prompt = {"prompt_token_ids": part.record.prompt_token_ids} if self.shown.token_ids else {}
        return {"choices": choices} | await self.prompt_logprobs(part) | prompt

    @property
    def _echo(self) -> str:
        return self.shown.echoes[0] if self.shown.echoes else ""

    async def _choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        text = self._echo + "".join(gathered.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if gathered.thoughts and self.shown.thoughts:
            message |= _thought("".join(gathered.thoughts))
        if gathered.calls:
            message["content"] = text or None
            message["tool_calls"] = [self._call(index, call.begun, call.arguments) for call in gathered.calls]
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
        content = self._echo
        return [_delta(i, {"role": "assistant", "content": content}, **prompt) for i in range(record.task.params.n)]

    async def chunks(self, update: Update) -> list[openai.Chunk]:
        """Log-probabilities and token ids of the update are in the first chunk only."""
        extra: dict[str, Any] = {}
        if update.token_ids and self.shown.logprobs is not None:
            extra["logprobs"] = await self._logprobs(update.token_ids, update.logprobs or [])
        if update.token_ids and self.shown.token_ids:
            extra["token_ids"] = update.token_ids
        deltas = list(self._deltas(update))
        if extra and not deltas:
            deltas = [({"content": ""}, 0)]
        finish = update.finish
        if finish is not None:
            deltas.append(({}, sum(map(units_of, update.events))))
        found = [openai.Chunk(_delta(update.choice, delta), units) for delta, units in deltas]
        if found and extra:
            found[0].choice.update(extra)
        if finish is not None:
            found[-1].choice.update(openai.ending(finish))
        return found

    def _deltas(self, update: Update) -> Iterator[tuple[dict[str, Any], int]]:
        """Deltas, each with the number of the update's units up to and including it."""
        units = 0
        for event in update.events:
            units += units_of(event)
            match event:
                case Thought():
                    if self.shown.thoughts:
                        yield _thought(event.text), units
                case Text():
                    yield {"content": event.text}, units
                case CallBegun():
                    yield {"tool_calls": [{"index": event.index, **self._call(update.choice, event, "")}]}, units
                case CallArguments():
                    yield {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}, units

    def _call(self, choice: int, begun: CallBegun, arguments: str) -> dict[str, Any]:
        """A call's id is derived from the request's, so a replayed stream has the same ids."""
        call_id = begun.id or f"call_{self.run.job.records[0].request_id[:20]}{choice:02x}{begun.index:04x}"
        return {"id": call_id, "type": "function", "function": {"name": begun.name, "arguments": arguments}}

    async def _logprobs(self, token_ids: list[int], entries: list[TopLogprobs]) -> dict[str, Any] | None:
        top = self.shown.logprobs
        if top is None:
            return None
        content = await encoded_list(chat_logprobs(self.run.text, token_ids, entries, top), 1 + top)
        return {"content": content, "refusal": None}


def _thought(text: str) -> dict[str, Any]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _delta(choice: int, delta: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **extra}


CHAT = Dialect(
    name="chat_completions",
    path="/v1/chat/completions",
    summary="Continue a conversation",
    body=ChatRequest,
    answer=ChatAnswer,
    job=chat_job,
    writer=lambda ctx, run, marks: ChatWriter(run, marks),
    error=OPENAI_ERRORS,
)
