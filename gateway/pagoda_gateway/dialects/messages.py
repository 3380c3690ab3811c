"""Anthropic's messages: one conversation in, one message of content blocks out.

A stream consists of blocks, one after another, each with a start, deltas and a stop; the whole message is what its
stream adds up to.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from pagoda_gateway.api.answer_schemas import MessagesAnswer
from pagoda_gateway.api.encoding import encoded, event
from pagoda_gateway.api.error_body import ANTHROPIC_ERRORS
from pagoda_gateway.api.messages_schemas import CountTokensRequest, MessagesRequest
from pagoda_gateway.clients import Caller, origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.dialects.messages_tools import thinking_options, wanted_of
from pagoda_gateway.dialects.messages_turns import chat_of
from pagoda_gateway.generation.answers import Plan
from pagoda_gateway.generation.job import Job, Shown
from pagoda_gateway.generation.positions import Marks
from pagoda_gateway.generation.prompts import ChatPrompt, Reader, work_size
from pagoda_gateway.generation.requests import named_as_in_body, new_job, new_record
from pagoda_gateway.generation.run import Run
from pagoda_gateway.generation.updates import Update
from pagoda_gateway.text.events import CallArguments, CallBegun, Event, Finish, Text, Thought
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import FinishReason, RequestRecord


async def _planned(ctx: GatewayContext, body: MessagesRequest, caller: Caller) -> tuple[RequestRecord, Plan]:
    """The record of a message, and the plan of its answer.

    Raises:
        PagodaError: a field asks for something impossible; `param` names it.
    """
    model = ctx.catalogue.find(body.model, caller)
    with named_as_in_body({"prompt": "messages", "stop": "stop_sequences"}):
        params = _params(body, model.text)
        wanted = wanted_of(body, model.text)
        reader = Reader(ctx.pool, model, caller.key, "messages", body.max_tokens)
        token_ids, thinking = await message_prompt(reader, body)
        if 0 < model.limits.max_model_len - len(token_ids) < body.max_tokens:
            params = msgspec.structs.replace(params, max_tokens=None)  # to the end of the context
        names = [tool.name for tool in body.tools]
    plan = await reader.plan(
        work_size(body.tools), wanted, thinking, lambda name: f"tools[{names.index(name)}].input_schema"
    )
    with named_as_in_body({"prompt": "messages", "stop": "stop_sequences", "grammar": _form_field(body)}):
        params = msgspec.structs.replace(params, grammar=plan.grammar)
        return new_record(model, token_ids, params, origin_of(caller), 0), plan


def _form_field(body: MessagesRequest) -> str:
    """The field that asks for a grammar."""
    return "tools" if body.tools_in_use else "thinking"


def _params(body: MessagesRequest, text: ModelText) -> SamplingParams:
    """The body's values, otherwise the model author's defaults. Raises InvalidParams."""
    asked = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    fields = {**text.sampling_defaults, **{name: value for name, value in asked.items() if value is not None}}
    return SamplingParams(**fields, max_tokens=body.max_tokens, stop=tuple(body.stop_sequences or ()))


async def prompt_ids(reader: Reader, body: CountTokensRequest) -> list[int]:
    """Token ids of the body's conversation. Raises PagodaError."""
    return (await message_prompt(reader, body)).token_ids


async def message_prompt(reader: Reader, body: CountTokensRequest) -> ChatPrompt:
    """The body's conversation as a prompt. Raises PagodaError."""
    template = reader.model.text.template(bool(body.tools_in_use))
    options = thinking_options(body, template.variables)
    return await reader.chat(work_size([body.messages, body.system, body.tools]), lambda: chat_of(body, options))


async def message_job(ctx: GatewayContext, body: MessagesRequest, caller: Caller) -> Job:
    """Raises PagodaError."""
    record, plan = await _planned(ctx, body, caller)
    shown = Shown(stream=bool(body.stream), how=plan.how, form_field=_form_field(body))
    return new_job("msg_", ctx.catalogue.find(body.model, caller), [record], shown, loose_grammar=plan.loose_grammar)


PIECES = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


class MessagesWriter:
    """Implements `Writer`."""

    def __init__(self, run: Run, marks: Marks | None = None) -> None:
        self._run = run
        self._marks = marks
        self._num_begun = 0
        self._open = ""  # the type of the open block
        self._finish: Finish | None = None

    async def whole(self) -> bytes:
        blocks: list[tuple[dict[str, Any], list[str]]] = []
        while updates := await self._run.next():
            for told in self._told(updates):
                if told["type"] == "content_block_start":
                    blocks.append((told["content_block"], []))
                elif told["type"] == "content_block_delta":
                    blocks[-1][1].append(told["delta"][PIECES[told["delta"]["type"]]])
        content = [_filled(block, "".join(pieces)) for block, pieces in blocks]
        return encoded(self._message(content) | self._ending() | {"usage": self._usage()})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The message starts with its first tokens, which say how much of the prompt was cached."""
        started = False
        while updates := await self._run.next():
            opening = b"" if started else self._event(self._opening())
            data = opening + b"".join(map(self._event, self._told(updates)))
            started = True
            if data:
                yield data
        closing = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        yield self._event(closing) + self._event({"type": "message_stop"})

    def _event(self, told: dict[str, Any]) -> bytes:
        """The event without what its reader already has."""
        if self._marks is None:
            return _event(told)
        delta = told["delta"] if told["type"] == "content_block_delta" else {}
        piece = PIECES[delta["type"]] if delta else ""
        size = len(delta[piece]) if piece else 1
        had = self._marks.skip(0, size)
        if had == size:
            return b""
        self._marks.move(0, 0, size - had)
        return self._marks.line() + _event(told | {"delta": delta | {piece: delta[piece][had:]}} if had else told)

    def _opening(self) -> dict[str, Any]:
        message = self._message([]) | self._ending() | {"usage": self._usage()}
        return {"type": "message_start", "message": message}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._run.job
        return {"id": job.id, "type": "message", "role": "assistant", "model": job.model, "content": content}

    def _told(self, updates: list[Update]) -> Iterator[dict[str, Any]]:
        for update in updates:
            for said in update.events:
                yield from self._block_events(said)

    def _block_events(self, said: Event) -> Iterator[dict[str, Any]]:
        match said:
            case Text():
                if self._open != "text":
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": said.text})
            case Thought():
                if self._open != "thinking":
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": said.text})
            case CallBegun():
                yield from self._begin({"type": "tool_use", "id": self._call_id(said), "name": said.name, "input": {}})
            case CallArguments():
                yield self._delta({"type": "input_json_delta", "partial_json": said.text})
            case Finish():
                self._finish = said
                yield from self._end()

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._num_begun, "content_block": block}
        self._num_begun += 1

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_begun - 1, "delta": delta}

    def _end(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._num_begun - 1}

    def _call_id(self, call: CallBegun) -> str:
        """It is derived from the request's, so a replayed stream has the same ids."""
        return call.id or f"toolu_{self._run.job.records[0].request_id[:20]}{call.index:06x}"

    def _ending(self) -> dict[str, Any]:
        """How the message ended, or that it has not yet."""
        finish = self._finish
        if finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        return {"stop_reason": self._stop_reason(finish), "stop_sequence": finish.stop_reason}

    def _stop_reason(self, finish: Finish) -> str:
        """A message with calls says tool_use, even if a stop sequence ended it."""
        if finish.reason is FinishReason.LENGTH:
            at_most = self._run.job.records[0].task.params.max_tokens
            return "model_context_window_exceeded" if at_most is None else "max_tokens"
        if finish.called:
            return "tool_use"
        return "end_turn" if finish.stop_reason is None else "stop_sequence"

    def _usage(self) -> dict[str, Any]:
        """Usage so far."""
        usage = self._run.usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.output_tokens,
        }


def _filled(block: dict[str, Any], said: str) -> dict[str, Any]:
    """The block with its content. A call that broke off has an empty input."""
    if block["type"] != "tool_use":
        return block | {block["type"]: said}
    try:
        whole = isinstance(msgspec.json.decode(said), dict)
    except msgspec.DecodeError:
        whole = False
    return block | {"input": msgspec.Raw(said.encode()) if whole else {}}


def _event(told: dict[str, Any]) -> bytes:
    return event(told, told["type"])


MESSAGES = Dialect(
    name="messages",
    path="/v1/messages",
    summary="Continue a conversation, as Anthropic's API has it",
    body=MessagesRequest,
    answer=MessagesAnswer,
    job=message_job,
    writer=lambda ctx, run, marks: MessagesWriter(run, marks),
    error=ANTHROPIC_ERRORS,
    ping_event=_event({"type": "ping"}),
)
