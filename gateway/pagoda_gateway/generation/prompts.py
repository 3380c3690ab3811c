"""Text becomes token ids in pieces whose cost the context bounds, however long the text is.

What is certain to be too long is refused before any work; what is likely to be is counted slice by slice until it is
certain. Nothing here runs on the event loop unless it is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from pagoda_gateway.api.schemas import ChatRequest, CompletionRequest, TokenizeRequest, Tool
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.http.text_pool import LARGE_SIZE
from pagoda_gateway.text.conversation import text_size
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import ModelLimits

SLICE_CHARS = 32 * 1024
CHARS_PER_TOKEN = 8  # a text of fewer characters per token of the context is tokenised without being counted first
CHARS_PER_VALUE = 8  # what a number or an empty object costs, as text
CERTAIN = 2  # slices cut words, so only twice too many tokens are certainly too many


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`text` is what the client wrote, None where it sent token ids."""

    token_ids: list[int]
    text: str | None = None


def model_limits(ctx: GatewayContext) -> ModelLimits:
    """What the workers report; until one has, what the model's files say.

    Raises:
        PagodaError: UNAVAILABLE when nobody knows the context length yet.
    """
    load, text = ctx.engine.load, ctx.text
    limits = ModelLimits(load.vocab_size or text.vocab_size, load.max_model_len or text.max_model_len)
    if limits.max_model_len < 1:
        raise PagodaError(ErrorCode.UNAVAILABLE, "no worker has registered yet", retry_after_s=1.0)
    return limits


class Reader:
    """Turns one request's text into tokens; its client's turns in the pool are its own.

    `asked` is how many output tokens the request wants, for messages; None for as many as there is room for. With
    `max_chars` that is the bound, and not the context.
    """

    def __init__(
        self, ctx: GatewayContext, client: str, param: str, *, asked: int | None = None, max_chars: int | None = None
    ) -> None:
        self._ctx = ctx
        self._client = client
        self._param = param
        self._asked = asked
        self._max_chars = max_chars

    async def _rendered(self, request: ChatRequest | TokenizeRequest) -> str:
        """The chat as its template renders it, marks included.

        Raises:
            PagodaError: the template does not take it, or it is certain not to fit.
        """
        ctx = self._ctx
        with_tools = tools_in_use(request)
        template = ctx.text.template(with_tools)
        if with_tools and not template.speaks_hermes:
            message = "this model's chat template has no tool calls, or none in a form that is supported"
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "tools")
        kwargs = template_kwargs(request, template.variables)
        template.check_kwargs(kwargs)

        def work() -> str:
            messages = [message.model_dump(exclude_none=True) for message in request.messages or ()]
            tools = template_tools(request.tools or ()) if with_tools else None
            self.check_size(text_size([messages, tools, kwargs]))
            return ctx.text.render_marked(
                messages, tools, request.add_generation_prompt, request.continue_final_message, **kwargs
            )

        return await ctx.pool.run(self._client, work_size([request.messages, request.tools, kwargs]), work)

    async def chat_ids(self, request: ChatRequest | TokenizeRequest, add_special_tokens: bool = False) -> list[int]:
        """Token ids of the rendered chat. Raises PagodaError."""
        text = await self._rendered(request)
        self.check_size(len(text))
        await self._count(text)
        return await self._ctx.pool.run(
            self._client, len(text), lambda: self._ctx.text.encode_marked(text, add_special_tokens)
        )

    async def text_ids(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of plain texts. Raises PagodaError CONTEXT_LENGTH_EXCEEDED."""
        for text in texts:
            self.check_size(len(text))
        found: list[list[int]] = []
        for part in _batches(texts):
            await self._count(part[0])  # what is longer than a slice is in a batch of its own

            def work(part: Sequence[str] = part) -> list[list[int]]:
                return [self._ctx.text.encode(text, add_special_tokens) for text in part]

            found += await self._ctx.pool.run(self._client, sum(map(len, part)), work)
        return found

    def check_size(self, num_chars: int) -> None:
        """Refuse before any work what is certainly too long. Raises PagodaError."""
        if self._max_chars is not None:
            if num_chars > self._max_chars:
                message = f"at most {self._max_chars} characters are allowed, got {num_chars}"
                raise InvalidParams([Problem(self._param, message)])
            return
        limit = model_limits(self._ctx).max_model_len
        at_least = self._ctx.text.min_tokens_of(num_chars)
        if at_least > limit:
            raise self._too_long(limit, at_least)

    async def _count(self, text: str) -> None:
        limit = model_limits(self._ctx).max_model_len
        if self._max_chars is not None or len(text) <= max(SLICE_CHARS, CHARS_PER_TOKEN * limit):
            return
        count = 0
        for start in range(0, len(text), SLICE_CHARS):
            part = text[start : start + SLICE_CHARS]
            encode = partial(self._ctx.text.encode, part, add_special_tokens=False)
            count += len(await self._ctx.pool.run(self._client, len(part), encode))
            if count > CERTAIN * limit:
                raise self._too_long(limit, count // CERTAIN)

    def _too_long(self, limit: int, at_least: int) -> PagodaError:
        asked = "" if self._asked is None else f" and {self._asked} output tokens were requested"
        message = f"this model's context is {limit} tokens; the prompt has more than {at_least - 1}{asked}"
        return PagodaError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, self._param)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in their order, a slice's worth or a single one at a time."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > SLICE_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def work_size(value: Any) -> int:
    """How much there is to read in a body's part: characters, and something for every value. Not counted further than
    to a large one."""
    waiting, size = [value], 0
    while waiting and size <= LARGE_SIZE:
        item = waiting.pop()
        size += len(item) if isinstance(item, str) else CHARS_PER_VALUE
        if isinstance(item, BaseModel):
            waiting += vars(item).values()
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return size


def tools_in_use(request: ChatRequest | TokenizeRequest) -> bool:
    return bool(request.tools) and getattr(request, "tool_choice", None) != "none"


def template_kwargs(request: ChatRequest | TokenizeRequest, read: frozenset[str]) -> dict[str, Any]:
    """What the template reads besides the messages. Some of it has fields of its own in OpenAI's API.

    Raises:
        InvalidParams: the same thing is said twice, or the template does not read it.
    """
    kwargs = dict(request.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity"):
        value = getattr(request, name, None)
        if value is None:
            continue
        if name not in read:
            raise InvalidParams([Problem(name, f"is {value[:64]!a}, but this model's chat template does not read it")])
        if name in kwargs:
            raise InvalidParams([Problem(name, "is also in chat_template_kwargs; give it once")])
        kwargs[name] = value
    return kwargs


def template_tools(tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


async def completion_prompts(ctx: GatewayContext, request: CompletionRequest, client: str = "") -> list[Prompt]:
    """The prompts of a plain completion. Special tokens written out in them are special tokens, as in vLLM."""
    prompts = prompts_of(request)
    at_most("prompt", len(prompts), ctx.config.max_prompts)
    reader = Reader(ctx, client, "prompt", asked=request.max_tokens)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids_of_texts = iter(await reader.text_ids(texts, request.add_special_tokens))
    return [
        Prompt(token_ids=next(ids_of_texts), text=prompt) if isinstance(prompt, str) else Prompt(token_ids=prompt)
        for prompt in prompts
    ]


def prompts_of(request: CompletionRequest) -> Sequence[Any]:
    """Each a text or a list of token ids. Raises InvalidParams."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidParams([Problem("prompt", "must have at least one prompt")])
    return [given] if isinstance(given[0], int) else given


def at_most(name: str, count: int, limit: int) -> None:
    """Raises InvalidParams."""
    if count > limit:
        raise InvalidParams([Problem(name, f"at most {limit} are allowed, got {count}")])
