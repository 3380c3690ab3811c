"""OpenAI's responses: items in, items out, as numbered events; stored, so that a later response can continue them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from pagoda_gateway.api.encoding import encoded, event
from pagoda_gateway.api.error_body import OPENAI_ERRORS
from pagoda_gateway.api.responses_answers import ResponseAnswer
from pagoda_gateway.api.responses_schemas import (
    Item,
    ResponsesRequest,
    read_items,
)
from pagoda_gateway.api.schemas import stop_strings
from pagoda_gateway.clients import Caller, origin_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.dialect import Dialect
from pagoda_gateway.dialects.logprobs import chat_logprobs
from pagoda_gateway.dialects.openai import template_options
from pagoda_gateway.dialects.responses_events import AlreadyTold, Telling, Told
from pagoda_gateway.dialects.responses_items import items_of, template_tool, turns_of
from pagoda_gateway.dialects.responses_tools import place_in, wanted_of
from pagoda_gateway.generation.job import Job, Shown
from pagoda_gateway.generation.positions import Marks, Place
from pagoda_gateway.generation.prompts import ChatPrompt, Reader, at_most, work_size
from pagoda_gateway.generation.requests import check_priority, check_products, named_as_in_body, new_job, new_record
from pagoda_gateway.generation.run import Run
from pagoda_gateway.store.tickets import KeptTickets
from pagoda_gateway.text.conversation import Chat
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import PLAIN, SamplingParams

_FIELDS = {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


async def responses_job(ctx: GatewayContext, body: ResponsesRequest, caller: Caller) -> Job:
    """Raises PagodaError naming the field."""
    model = ctx.catalogue.find(body.model, caller)
    check_priority(ctx.config, model, body.priority)
    items = [*await _said_before(ctx, body, caller), *items_of(body.input)]
    at_most("input", len(items), ctx.config.max_messages)
    field = "tools" if body.tools_in_use else body.form.field
    with named_as_in_body(_FIELDS | {"grammar": field}):
        params = _params(body, model.text)
        wanted = wanted_of(body, model.text.formats)
        reader = Reader(ctx.pool, model, caller.key, "input", params.max_tokens)
        token_ids, thinking = await _prompt(reader, body, items)
        check_products(ctx.config, model, params, [len(token_ids)], Shown())  # streams too end with the whole
        plan = await reader.plan(work_size(body.tools), wanted, thinking, place_in(body))
        params = msgspec.structs.replace(params, grammar=plan.grammar)
        record = new_record(model, token_ids, params, origin_of(caller, body.cache_salt), body.priority)
    shown = Shown(stream=bool(body.stream), how=plan.how, logprobs=params.logprobs, form_field=field)
    job = new_job("resp_", model, [record], shown, loose_grammar=plan.loose_grammar)
    kept = b"" if body.store is False else encoded([item.model_dump(exclude_none=True) for item in items])
    return msgspec.structs.replace(job, owner=caller.tenant, head=_head(body, job, params), items=kept)


async def _said_before(ctx: GatewayContext, body: ResponsesRequest, caller: Caller) -> list[Item]:
    if body.previous_response_id is None:
        return []
    try:
        return read_items(await ctx.responses.conversation(body.previous_response_id, caller.tenant))
    except PagodaError as error:
        error.param = "previous_response_id"
        raise


def _params(body: ResponsesRequest, text: ModelText) -> SamplingParams:
    """The body's values, otherwise the model author's defaults. Raises InvalidParams."""
    asked = {name: value for name in PLAIN if (value := getattr(body, name, None)) is not None}
    return SamplingParams(
        **{**text.sampling_defaults, **asked},
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if body.with_logprobs else None,
        seed=body.seed,
        stop=stop_strings(body.stop),
        grammar=body.form.grammar,
    )


async def _prompt(reader: Reader, body: ResponsesRequest, items: Sequence[Item]) -> ChatPrompt:
    def read() -> Chat:
        tools = [template_tool(tool) for tool in body.tools_in_use]
        return Chat(
            turns=list(turns_of(body.instructions, items)),
            tools=tools,
            options=_template_options(body, reader.model.text.template(bool(tools)).variables),
        )

    return await reader.chat(work_size([list(items), body.instructions, body.tools]), read)


def _template_options(body: ResponsesRequest, known: frozenset[str]) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    verbosity = None if body.text is None else body.text.verbosity
    said = [("reasoning.effort", "reasoning_effort", effort), ("text.verbosity", "verbosity", verbosity)]
    return template_options(body.chat_template_kwargs, said, known)


def _head(body: ResponsesRequest, job: Job, params: SamplingParams) -> dict[str, Any]:
    """What a response repeats of its request, with defaults filled in."""
    choice = body.tool_choice or "auto"
    text = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": job.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [{"strict": None} | tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def telling_of(job: Job, known: AlreadyTold | None = None) -> Telling:
    return Telling(job.head, job.records[0].request_id[:20], known)


async def told(run: Run, telling: Telling) -> AsyncGenerator[Told, None]:
    """All events of a run but the last. Raises PagodaError."""
    for said in telling.begin():
        yield said
    top, num_tokens = run.job.shown.logprobs, 0
    while updates := await run.next():
        for update in updates:
            entries = () if top is None else chat_logprobs(run.text, update.token_ids, update.logprobs or (), top)
            num_thoughts = max(0, (run.num_reasoning_tokens() or 0) - num_tokens)  # in this update; they come first
            num_tokens += len(update.token_ids)
            for said in telling.update(update, list(entries)[num_thoughts:]):
                yield said


class ResponsesWriter:
    """Implements `Writer`. A response to be stored is stored before its last event is sent."""

    def __init__(self, ctx: GatewayContext, run: Run, marks: Marks | None = None) -> None:
        self._run = run
        self._kept = ctx.responses
        self._tickets = KeptTickets(ctx.store, ctx.config.keep_tickets_s)
        self._marks = marks
        self._told = _told_before(marks)
        self._telling = telling_of(run.job, _told_before(marks))

    async def whole(self) -> bytes:
        async for _ in told(self._run, self._telling):
            pass
        for _ in self._telling.finish(self._run.usage(), int(time.time()), self._run.num_reasoning_tokens()):
            await self._keep()
        return encoded(self._telling.response)

    async def events(self) -> AsyncGenerator[bytes, None]:
        has_ended = True
        try:
            async with aclosing(told(self._run, self._telling)) as events:
                async for said in events:
                    yield self._event(said)
            last = self._telling.finish(self._run.usage(), int(time.time()), self._run.num_reasoning_tokens())
        except PagodaError as error:
            if self._marks is not None and error.status.retryable:
                raise  # the stream can be resumed: this is not its end
            has_ended = self._marks is None  # with a ticket, it may continue without this reader, or be generated again
            last = self._telling.fail(error, self._run.usage())
        for said in last:
            if has_ended:
                await self._keep()
            else:
                self._telling.response["store"] = False
            yield self._event(said)

    def _event(self, said: Told) -> bytes:
        data = event(said, said["type"])
        if self._marks is None:
            return data
        self._told.add(said)
        self._marks.move_to(0, Place(self._told.logprobs, self._told.units))
        self._marks.besides = self._told.num_events
        return self._marks.line() + data

    async def _keep(self) -> None:
        """Store the response. If that fails, its `store` field says so, and it is otherwise unaffected."""
        job, response = self._run.job, self._telling.response
        if response["store"]:
            try:
                response["store"] = await self._is_wanted()
                if response["store"]:
                    await self._kept.finished(job.id, job.owner, job.items, encoded(response))
            except PagodaError:
                response["store"] = False

    async def _is_wanted(self) -> bool:
        """Whether the response may still be stored. Deleting one deletes its ticket first, and a reader may reach the
        end long after that."""
        if self._marks is None:
            return True
        found = await self._tickets.find(self._marks.stream, self._run.job.owner)
        return found is not None and found.ticket.job_id == self._run.job.id


def _told_before(marks: Marks | None) -> AlreadyTold:
    if marks is None:
        return AlreadyTold()
    place = marks.known(0)
    return AlreadyTold(num_events=marks.besides, units=place.units, logprobs=place.tokens)


RESPONSES = Dialect(
    name="responses",
    path="/v1/responses",
    summary="Answer, and keep the answer to go on from",
    body=ResponsesRequest,
    answer=ResponseAnswer,
    job=responses_job,
    writer=ResponsesWriter,
    error=OPENAI_ERRORS,
)
