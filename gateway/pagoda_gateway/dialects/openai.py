"""Shared by OpenAI's dialects: the head of every object, usage, errors, and answers written whole or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pagoda_gateway.api.encoding import DONE, Events, encoded, encoded_list, event
from pagoda_gateway.api.forms.fields import Form
from pagoda_gateway.api.schemas import PLAIN_VERBOSITY, Sampling, stop_strings
from pagoda_gateway.clients import Caller
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.dialects.logprobs import prompt_logprobs
from pagoda_gateway.generation.job import Shown
from pagoda_gateway.generation.positions import Marks, units_of
from pagoda_gateway.generation.prompts import Reader, num_kept
from pagoda_gateway.generation.requests import named_as_in_body
from pagoda_gateway.generation.run import Part, Run
from pagoda_gateway.generation.updates import Gathered, Update
from pagoda_gateway.text.chat import thinking_switch
from pagoda_gateway.text.events import Finish
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import PLAIN, SamplingParams
from pagoda_proto.records import FinishReason

NO_FORM = Form("", "")
BEGINNING = 1  # a choice's first unit
Chunker = Callable[[list[dict[str, Any]]], bytes]


class Chunk(NamedTuple):
    """One choice of one event; `units`: how many of its update's units it and the chunks before it contain."""

    choice: dict[str, Any]
    units: int


def params(body: Sampling, text: ModelText, **asked: Any) -> SamplingParams:
    """Sampling parameters: those `asked` by the dialect, else the body's, the model author's defaults, OpenAI's. The
    author's defaults are for sampling and do not apply to beam search.

    Raises InvalidParams; the rules are in `pagoda_proto.params`, the same for all APIs.
    """
    defaults = {} if body.use_beam_search else text.sampling_defaults
    fields: dict[str, Any] = {**defaults, "prompt_logprobs": body.prompt_logprobs}
    fields |= {name: value for name in PLAIN if (value := getattr(body, name)) is not None}
    form = body.form or NO_FORM
    with named_as_in_body({"grammar": form.field}):
        grammar = _grammar(form, text)
        return SamplingParams(
            **fields | asked,
            seed=body.seed,
            stop=stop_strings(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            bad_words_token_ids=text.bad_words(body.bad_words or ()),
            grammar=grammar,
        )


def _grammar(form: Form, text: ModelText) -> str:
    """The form's grammar. End-of-sequence tokens end a choice, so in a form their names are plain text."""
    special = {} if form.tag is None else text.special.ids
    try:
        return form.grammar_with({name: token for name, token in special.items() if token not in text.eos_token_ids})
    except ValueError as error:
        raise InvalidParams([Problem("grammar", str(error))]) from error


def reader(ctx: GatewayContext, body: Sampling, caller: Caller, param: str, asked: int | None) -> Reader:
    """A reader of the body's text. A text to be truncated may be longer than the context.

    Raises:
        PagodaError: the model is not known, or its context is too short for what is to be kept of a prompt.
    """
    model, truncate = ctx.catalogue.find(body.model, caller), body.truncate_prompt_tokens
    if truncate is None:
        return Reader(ctx.pool, model, caller.key, param, asked)
    keep = num_kept(truncate, asked, model.limits.max_model_len)
    return Reader(ctx.pool, model, caller.key, param, asked, ctx.config.max_tokenize_chars, keep)


def template_options(
    kwargs: Mapping[str, Any] | None, said: Iterable[tuple[str, str, str | None]], known: frozenset[str]
) -> dict[str, Any]:
    """The chat template's variables besides the conversation: `kwargs`, and OpenAI's own fields in `said` (field,
    variable, value); `known` are the variables that this template reads.

    Raises:
        InvalidParams: a variable is given twice, or the template does not read it.
    """
    options = dict(kwargs or {})
    for field, name, value in said:
        if value is None or (name == "verbosity" and value == PLAIN_VERBOSITY and name not in known):
            continue
        switch = thinking_switch(known) if (name, value) == ("reasoning_effort", "none") else ""
        if name not in known and switch and switch not in options:
            options[switch] = False
            continue
        if name not in known:
            raise InvalidParams([Problem(field, f"is {value[:64]!a}, but this model's chat template does not read it")])
        if name in options:
            raise InvalidParams([Problem(field, "is also in chat_template_kwargs; give it once")])
        options[name] = value
    return options


def shown(body: Sampling, **more: Any) -> Shown:
    """How the answer is to be shown, according to fields that all bodies have, and `more` of one dialect."""
    options = body.stream_options
    return Shown(
        n=1 if body.n is None else body.n,
        stream=bool(body.stream),
        usage=options is not None and options.include_usage,
        running_usage=options is not None and options.continuous_usage_stats,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        **{"form_field": "" if body.form is None else body.form.field} | more,
    )


def ending(finish: Finish | None) -> dict[str, Any]:
    """The fields of a choice's ending; null while it has none."""
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    is_call = finish.called and finish.reason is FinishReason.STOP
    return {"finish_reason": "tool_calls" if is_call else finish.reason, "stop_reason": finish.stop_reason}


class OpenAIWriter(ABC):
    """Implements `Writer`. `object_name` is the `object` of whole answers, `chunk_name` that of events."""

    object_name: str
    chunk_name: str

    def __init__(self, run: Run, marks: Marks | None = None) -> None:
        self.run = run
        self.shown = run.job.shown
        self.gathered = [Gathered() for part in run.parts for _ in part.choices]
        self._marks = marks
        self.known_to_begin = [marks is not None and marks.skip(i, BEGINNING) > 0 for i in range(len(self.gathered))]

    @abstractmethod
    async def fields(self) -> dict[str, Any]:
        """The fields of a whole answer besides its head and usage."""

    @abstractmethod
    async def chunks(self, update: Update) -> list[Chunk]:
        """Chunks for what is new; the last one has the ending, if the choice ended."""

    def opening(self) -> list[dict[str, Any]]:
        """The choices with which a stream's first chunks begin: one for each choice, or none."""
        return []

    def pass_over(self, update: Update) -> None:  # noqa: B027 - most count nothing along the way
        """Account for an update that the reader already has."""

    def seen(self, update: Update) -> Update:
        """The part of an update that the client gets."""
        return update

    def usage(self) -> dict[str, Any]:
        usage = self.run.usage()
        thoughts = self.run.num_reasoning_tokens()
        num_output = 0 if self.shown.prompt_only else usage.output_tokens
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": usage.prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        } | ({} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}})

    async def prompt_logprobs(self, part: Part) -> dict[str, Any]:
        """The field of prompt log-probabilities, if they were asked for."""
        top = self.shown.prompt_logprobs
        if top is None:
            return {}
        entries = prompt_logprobs(self.run.text, part.record.prompt_token_ids, part.prompt_logprobs, top)
        return {"prompt_logprobs": await encoded_list(entries, 1 + top)}

    async def whole(self) -> bytes:
        while updates := await self.run.next():
            for update in updates:
                self.gathered[update.choice].add(self.seen(update))
        return encoded(self._head(self.object_name) | await self.fields() | {"usage": self.usage()})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks of all choices that changed, joined per batch of updates."""
        head = self._head(self.chunk_name)
        chunk = self._chunker(head)
        openings = [chunk([choice]) for choice in self.opening()]
        opening: bytes | None = None  # its ids name weights and numerics, known with the first updates
        while updates := await self.run.next():
            opening = self._opening(openings) if opening is None else opening
            data = b"".join([await self._told(chunk, self.seen(update)) for update in updates])
            if data:
                yield opening + data
                opening = b""
        yield (self._opening(openings) if opening is None else opening) + self._closing(head) + DONE

    def _opening(self, events: Sequence[bytes]) -> bytes:
        left = [(i, each) for i, each in enumerate(events) if not self.known_to_begin[i]]
        return b"".join([self._id(i, 0, BEGINNING) + each for i, each in left])

    async def _told(self, chunk: Chunker, update: Update) -> bytes:
        if self._marks is None:
            return b"".join([chunk([each.choice]) for each in await self.chunks(update)])
        had, left = self._marks.cut(update)
        self.pass_over(had)
        data, told, num_tokens = b"", 0, len(left.token_ids)
        for each in await self.chunks(left):
            data += self._id(left.choice, num_tokens, each.units - told) + chunk([each.choice])
            told, num_tokens = each.units, 0
        self._marks.move(left.choice, num_tokens, max(0, sum(map(units_of, left.events)) - told))
        return data

    def _id(self, choice: int, tokens: int, units: int) -> bytes:
        """The id line of an event that contains this many tokens and units."""
        if self._marks is None:
            return b""
        self._marks.move(choice, tokens, units)
        return self._marks.line()

    def _closing(self, head: dict[str, Any]) -> bytes:
        marks = self._marks
        if not self.shown.usage or (marks is not None and marks.besides):
            return b""
        if marks is not None:
            marks.besides = 1
        return (b"" if marks is None else marks.line()) + event(head | {"choices": [], "usage": self.usage()})

    def _chunker(self, head: dict[str, Any]) -> Chunker:
        """Return a function from choices to their event."""
        if self.shown.usage and self.shown.running_usage:
            return lambda choices: event({**head, "choices": choices, "usage": self.usage()})
        return Events(head, "choices", {"usage": None} if self.shown.usage else {}).event

    def _head(self, object_name: str) -> dict[str, Any]:
        job = self.run.job
        return {
            "id": job.id,
            "object": object_name,
            "created": job.created,
            "model": job.model,
            "system_fingerprint": self.run.fingerprint or None,
        }
