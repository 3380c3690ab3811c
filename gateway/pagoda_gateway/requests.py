"""A request body becomes request records: everything a client can get wrong is found here, before anything runs.

Names of fields in errors are those of the body; the rules themselves are in `pagoda_proto.params`, one set for all
doors.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from pagoda_gateway.context import GatewayContext
from pagoda_gateway.errors import invalid_fields
from pagoda_gateway.json_body import check_content_type, parse_object
from pagoda_gateway.schemas import ChatRequest, CompletionRequest, Message, Sampling, TextPart, TokenizeRequest, Tool
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import MAX_N, MAX_SEED, ModelLimits, SamplingParams, check_for_model
from pagoda_proto.records import RequestRecord

THREAD_ABOVE_CHARS = 4096  # shorter texts are tokenised faster than a thread is woken
DEFAULT_COMPLETION_TOKENS = 16
_SAME_NAME = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs",
)  # fmt: skip

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`text` is what the client wrote, None where it sent token ids."""

    token_ids: list[int]
    text: str | None = None


async def read_body(ctx: GatewayContext, request: Request, schema: type[Body]) -> Body:
    """The request's body as `schema`; whatever is wrong with it is a PagodaError."""
    check_content_type(request.headers.get("content-type", ""))
    data = await request.body()

    def work() -> Body:
        body = parse_object(data)
        _check_counts(ctx, body)
        return parse_body(schema, body)

    return await in_thread_if_long(len(data), work)


def _check_counts(ctx: GatewayContext, body: dict[str, Any]) -> None:
    """What is far too much is not even looked at."""
    config = ctx.config
    most_ids = max(config.max_prompts, ctx.engine.load.max_model_len, ctx.text.max_model_len)
    for name, limit in (("messages", config.max_messages), ("tools", config.max_tools), ("prompt", most_ids)):
        value = body.get(name)
        if isinstance(value, list):
            _at_most(name, len(value), limit)


def parse_body(schema: type[Body], body: dict[str, Any]) -> Body:
    """Raises InvalidParams naming each field at fault."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise invalid_fields(error, body) from error


def check_model(ctx: GatewayContext, name: str | None) -> None:
    """Raises PagodaError MODEL_NOT_FOUND."""
    if name is not None and name != ctx.served_model_name:
        message = f"the model {name[:64]!a} does not exist here; this server has {ctx.served_model_name!r}"
        raise PagodaError(ErrorCode.MODEL_NOT_FOUND, message, "model")


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


async def in_thread_if_long(num_chars: int, work: Callable[[], T]) -> T:
    """Long texts are rendered and tokenised beside the event loop."""
    return await asyncio.to_thread(work) if num_chars > THREAD_ABOVE_CHARS else work()


# Chat


async def chat_record(ctx: GatewayContext, request: ChatRequest) -> RequestRecord:
    """The record of a chat request.

    Raises:
        PagodaError: something about it cannot be done; `param` names the field.
    """
    check_model(ctx, request.model)
    limits = model_limits(ctx)
    max_tokens_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    with _named_as_in_body({"prompt": "messages", "max_tokens": max_tokens_name}):
        params = sampling_params(
            request,
            ctx.text,
            n=1 if request.n is None else request.n,
            max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        prompt = await chat_prompt(ctx, request, limits)
        return _record(ctx, request, prompt, params)


def tools_in_use(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


async def chat_prompt(
    ctx: GatewayContext,
    request: ChatRequest | TokenizeRequest,
    limits: ModelLimits | None,
    add_special_tokens: bool = False,
) -> Prompt:
    """Render and tokenise `request.messages`; without `limits`, whatever their length."""
    with_tools = tools_in_use(request) if isinstance(request, ChatRequest) else bool(request.tools)
    template = ctx.text.template(with_tools)
    if with_tools and not template.speaks_hermes:
        message = "this model's chat template has no tool calls, or none in a form that is supported"
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "tools")
    kwargs = request.chat_template_kwargs or {}
    template.check_kwargs(kwargs)
    messages = template_messages(request.messages or ())
    tools = template_tools(request.tools or ()) if with_tools else None
    content = "".join(message["content"] for message in messages)
    if limits is not None:
        _check_size(ctx.text, content, limits)

    def work() -> Prompt:
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=kwargs,
        )
        return Prompt(token_ids=ctx.text.encode(text, add_special_tokens), text=text)

    return await in_thread_if_long(len(content), work)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content is text, tool arguments are objects, no empty keys."""
    return [_template_message(message, i) for i, message in enumerate(messages)]


def _template_message(message: Message, index: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": _flat(message.content)}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"messages[{index}].tool_calls[{i}]"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return found


def _flat(content: str | list[TextPart] | None) -> str:
    return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode()) if text else {}
    except PagodaError as error:
        message = "must be a JSON object, as text"
        raise InvalidParams([Problem(f"{where}.function.arguments", message)]) from error


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


# Plain completions


async def completion_records(ctx: GatewayContext, request: CompletionRequest) -> list[tuple[Prompt, RequestRecord]]:
    """One record per prompt, with the prompt as it was given. Raises PagodaError, as `chat_record`."""
    check_model(ctx, request.model)
    limits = model_limits(ctx)
    params = completion_params(ctx, request)
    prompts = await completion_prompts(ctx, request, limits)
    return [(prompt, _record(ctx, request, prompt, params)) for prompt in prompts]


def completion_params(ctx: GatewayContext, request: CompletionRequest) -> SamplingParams:
    """`best_of` is what runs, ranked by the log-probabilities it therefore asks for."""
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of > MAX_N:
        raise InvalidParams([Problem("best_of", f"must be at most {MAX_N}, got {request.best_of}")])
    ranked = request.best_of is not None and request.best_of > n
    echoed = request.logprobs if request.echo else None
    asked = [value for value in (request.prompt_logprobs, echoed) if value is not None]
    return sampling_params(
        request,
        ctx.text,
        n=request.best_of if request.best_of is not None and n >= 1 else n,
        max_tokens=_completion_max_tokens(request),
        logprobs=0 if ranked and request.logprobs is None else request.logprobs,
        prompt_logprobs=max(asked) if asked else None,
    )


def shows_no_output(request: CompletionRequest) -> bool:
    """`max_tokens: 0` with `echo` asks about the prompt only. The engine core generates one token, not shown."""
    return request.echo and request.max_tokens == 0


def _completion_max_tokens(request: CompletionRequest) -> int:
    if shows_no_output(request):
        return 1
    return DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


async def completion_prompts(ctx: GatewayContext, request: CompletionRequest, limits: ModelLimits) -> list[Prompt]:
    given = request.prompt
    if isinstance(given, str):
        given = [given]
    prompts: Sequence[Any] = [given] if given and isinstance(given[0], int) else given
    if not prompts:
        raise InvalidParams([Problem("prompt", "must have at least one prompt")])
    _at_most("prompt", len(prompts), ctx.config.max_prompts)
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_size(ctx.text, prompt, limits)

    def work() -> list[Prompt]:
        return [
            Prompt(token_ids=ctx.text.encode(prompt, request.add_special_tokens), text=prompt)
            if isinstance(prompt, str)
            else Prompt(token_ids=prompt)
            for prompt in prompts
        ]

    return await in_thread_if_long(sum(map(len, prompts)), work)


# Both


def sampling_params(
    request: Sampling, text: ModelText, *, n: int, max_tokens: int | None, logprobs: int | None, **overrides: Any
) -> SamplingParams:
    """The request's values, else the model author's defaults, else OpenAI's. Raises InvalidParams."""
    fields: dict[str, Any] = dict(text.sampling_defaults)
    fields |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        fields["top_k"] = request.top_k
    fields["top_k"] = 0 if fields.get("top_k") == -1 else int(fields.get("top_k", 0))
    stop = () if request.stop is None else request.stop
    return SamplingParams(
        **fields | overrides,
        n=n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        seed=None if request.seed is None else request.seed & MAX_SEED,  # negative ones count from 2^64 down
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words_token_ids=text.bad_words(request.bad_words or ()),
    )


def _record(ctx: GatewayContext, request: Sampling, prompt: Prompt, params: SamplingParams) -> RequestRecord:
    check_for_model(params, prompt.token_ids, model_limits(ctx))
    return RequestRecord(
        request_id=secrets.token_hex(16),
        prompt_token_ids=prompt.token_ids,
        params=params,
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        eos_token_ids=ctx.text.eos_token_ids,
        cache_salt=request.cache_salt or "",
        priority=request.priority,
    )


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidParams([Problem(name, f"at most {limit} are allowed, got {count}")])


def _check_size(text: ModelText, prompt: str, limits: ModelLimits) -> None:
    """Refuse what cannot fit before spending time on tokenising it."""
    if len(prompt) > THREAD_ABOVE_CHARS:
        at_least = text.min_tokens_of(prompt)
        if at_least > limits.max_model_len:
            message = f"this model's context is {limits.max_model_len} tokens; the prompt has at least {at_least}"
            raise PagodaError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, "prompt")


@contextmanager
def _named_as_in_body(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidParams as error:
        renamed = [Problem(names.get(problem.param, problem.param), problem.message) for problem in error.problems]
        raise InvalidParams(renamed) from error
    except PagodaError as error:
        if error.param is None or error.param not in names:
            raise
        raise PagodaError(error.code, error.message, names[error.param]) from error
