"""A request body becomes request records: everything a client can get wrong is found here, before anything runs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pagoda_gateway.api.schemas import ChatRequest, CompletionRequest, Sampling
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.prompts import Prompt, Reader, completion_prompts, model_limits, prompts_of
from pagoda_gateway.generation.sampling import chat_params, completion_params
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import SamplingParams, check_for_model
from pagoda_proto.records import Generate, RequestRecord

FCFS = "fcfs"
BYTES_PER_LOGPROB = 160  # two numbers as Python keeps them, and as JSON


def check_model(ctx: GatewayContext, name: str | None) -> None:
    """Raises PagodaError MODEL_NOT_FOUND."""
    if name is not None and name != ctx.served_model_name:
        message = f"the model {name[:64]!a} does not exist here; this server has {ctx.served_model_name!r}"
        raise PagodaError(ErrorCode.MODEL_NOT_FOUND, message, "model")


async def chat_record(ctx: GatewayContext, request: ChatRequest, client: str = "") -> RequestRecord:
    """The record of a chat request.

    Raises:
        PagodaError: something about it cannot be done; `param` names the field.
    """
    check_model(ctx, request.model)
    _check_priority(ctx, request.priority)
    max_tokens_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    with _named_as_in_body({"prompt": "messages", "max_tokens": max_tokens_name}):
        params = chat_params(ctx.text, request)
        token_ids = await Reader(ctx, client, "messages", asked=params.max_tokens).chat_ids(request)
        check_products(ctx, request, params, [len(token_ids)])
        return _record(ctx, request, token_ids, params)


async def completion_records(
    ctx: GatewayContext, request: CompletionRequest, client: str = ""
) -> list[tuple[Prompt, RequestRecord]]:
    """One record per prompt, with the prompt as it was given. Raises PagodaError, as `chat_record`."""
    check_model(ctx, request.model)
    _check_priority(ctx, request.priority)
    params = completion_params(ctx.text, request)
    lengths = [0 if isinstance(prompt, str) else len(prompt) for prompt in prompts_of(request)]
    check_products(ctx, request, params, lengths)
    prompts = await completion_prompts(ctx, request, client)
    check_products(ctx, request, params, [len(prompt.token_ids) for prompt in prompts])
    return [(prompt, _record(ctx, request, prompt.token_ids, params)) for prompt in prompts]


def check_products(ctx: GatewayContext, request: Sampling, params: SamplingParams, lengths: Sequence[int]) -> None:
    """Numbers that are harmless one by one may not multiply to more than an answer should hold.

    Raises:
        InvalidParams: naming the fields and the product.
    """
    if params.prompt_logprobs is not None:
        values = sum(lengths) * (1 + params.prompt_logprobs)
        limit = ctx.config.max_prompt_logprob_values
        if values > limit:
            name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
            what = f"{len(lengths)} prompts of {sum(lengths)} tokens together x (1 + {name} {params.prompt_logprobs})"
            raise InvalidParams([Problem(name, f"{what} are {values} values; at most {limit} are allowed")])
    if params.logprobs is not None and not request.stream:
        room = model_limits(ctx).max_model_len
        tokens = sum(min(params.max_tokens or room, max(1, room - length)) for length in lengths)
        values = params.n * tokens * (1 + params.logprobs)
        limit = ctx.config.max_logprob_values
        if values > limit:
            what = f"n {params.n} x {tokens} tokens of max_tokens x (1 + logprobs {params.logprobs})"
            why = f"{what} are {values} values; at most {limit} are allowed without stream: true"
            raise InvalidParams([Problem("logprobs", why)])


def held_bytes(params: SamplingParams, lengths: Sequence[int]) -> int:
    """What the prompt log-probabilities of a request take while they are gathered and written."""
    values = 0 if params.prompt_logprobs is None else sum(lengths) * (1 + params.prompt_logprobs)
    return values * BYTES_PER_LOGPROB


def _check_priority(ctx: GatewayContext, priority: int) -> None:
    if priority == 0:
        return
    if ctx.engine.load.policy == FCFS:
        message = f"is {priority}, but the scheduling policy here is {FCFS!r}, which has no priorities"
        raise InvalidParams([Problem("priority", message)])
    if priority < ctx.config.min_priority:
        message = f"must be at least {ctx.config.min_priority} here (lower runs earlier), got {priority}"
        raise InvalidParams([Problem("priority", message)])


def _record(ctx: GatewayContext, request: Sampling, token_ids: list[int], params: SamplingParams) -> RequestRecord:
    check_for_model(params, token_ids, model_limits(ctx))
    return RequestRecord(
        request_id=secrets.token_hex(16),
        prompt_token_ids=token_ids,
        task=Generate(
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=ctx.text.eos_token_ids,
        ),
        cache_salt=request.cache_salt or "",
        priority=request.priority,
    )


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
