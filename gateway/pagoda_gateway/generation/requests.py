"""Checks that every request must pass before it runs, whatever its API, and the record that is made from it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.clients import Origin
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.generation.job import Job, Shown
from pagoda_gateway.text.conversation import text_size
from pagoda_proto.errors import InvalidParams, PagodaError, Problem
from pagoda_proto.params import SamplingParams, check_for_model
from pagoda_proto.pooling.kinds import EMBED, GENERATE
from pagoda_proto.records import Generate, RequestRecord

WITHOUT_PRIORITIES = ("fcfs", "fair")  # policies
BYTES_PER_TOKEN = 16  # of a prompt, as Python objects
BYTES_PER_LOGPROB = 160  # two numbers, as Python objects and as JSON


def check_generates(model: ServedModel) -> None:
    """Raises InvalidParams for an embedding or scoring model."""
    kind = model.text.reading.kind
    if kind != GENERATE:
        use = "/v1/embeddings" if kind == EMBED else "/classify, /score and /rerank"
        raise InvalidParams([Problem("model", f"{model.name!r} does not generate text; use {use}")])


def check_products(
    config: GatewayConfig, model: ServedModel, params: SamplingParams, lengths: Sequence[int], shown: Shown
) -> None:
    """Reject parameters that are harmless one by one but whose product exceeds what an answer may hold.

    Raises:
        InvalidParams: names the fields and the product.
    """
    if params.prompt_logprobs is not None:
        values = sum(lengths) * (1 + params.prompt_logprobs)
        limit = config.max_prompt_logprob_values
        if values > limit:
            name = "logprobs" if shown.prompt_logprobs is None else "prompt_logprobs"
            what = f"{len(lengths)} prompts of {sum(lengths)} tokens together x (1 + {name} {params.prompt_logprobs})"
            raise InvalidParams([Problem(name, f"{what} are {values} values; at most {limit} are allowed")])
    if params.logprobs is not None and not shown.stream:
        room = model.limits.max_model_len
        tokens = sum(min(params.max_tokens or room, max(1, room - length)) for length in lengths)
        values = params.n * tokens * (1 + params.logprobs)
        limit = config.max_logprob_values
        if values > limit:
            what = f"n {params.n} x {tokens} tokens of max_tokens x (1 + logprobs {params.logprobs})"
            why = f"{what} are {values} values; at most {limit} are allowed in one object"
            raise InvalidParams([Problem("logprobs", why)])


def held_bytes(job: Job) -> int:
    """Memory that a job holds while it runs, in bytes: its grammars, its conversation, and its prompt log-probabilities
    while they are collected and written."""
    params = job.records[0].task.params
    top = params.prompt_logprobs
    told = 0 if top is None else job.num_prompt_tokens * (1 + top) * BYTES_PER_LOGPROB
    schemas = sum(text_size(function.parameters) for function in job.shown.how.functions)
    return len(params.grammar) + len(job.loose_grammar) + schemas + len(job.items) + told


def new_record(
    model: ServedModel,
    token_ids: list[int],
    params: SamplingParams,
    origin: Origin,
    priority: int,
    name: str | None = None,
) -> RequestRecord:
    """`name` is the client's name for the request; the id ends with it, so that logs show it.

    Raises:
        PagodaError: parameters or prompt do not fit the model.
    """
    check_generates(model)
    check_for_model(params, token_ids, model.limits)
    return RequestRecord(
        request_id=secrets.token_hex(16) + (f".{name}" if name else ""),
        prompt_token_ids=token_ids,
        task=Generate(
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=model.text.eos_token_ids,
        ),
        priority=priority,
        adapter=model.adapter,
        **origin._asdict(),
    )


def new_job(
    prefix: str,
    model: ServedModel,
    records: Sequence[RequestRecord],
    shown: Shown,
    name: str | None = None,
    **more: Any,
) -> Job:
    """The job's id is `prefix` and the client's `name`, or the first record's id; `more` holds rarer fields."""
    return Job(
        id=prefix + (name or records[0].request_id),
        created=int(time.time()),
        model=model.name,
        records=tuple(records),
        shown=shown,
        **more,
    )


def check_priority(config: GatewayConfig, model: ServedModel, priority: int) -> None:
    """Raises InvalidParams if the policy has no priorities, or if it is more urgent than allowed."""
    policy = model.engine.load.policy
    if priority and policy in WITHOUT_PRIORITIES:
        message = f"is {priority}, but the scheduling policy here is {policy!r}, which has no priorities"
        raise InvalidParams([Problem("priority", message)])
    if priority and priority < config.min_priority:
        message = f"must be at least {config.min_priority} here (lower runs earlier), got {priority}"
        raise InvalidParams([Problem("priority", message)])


@contextmanager
def named_as_in_body(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors to the names in the client's body."""
    try:
        yield
    except InvalidParams as error:
        renamed = [Problem(names.get(problem.param, problem.param), problem.message) for problem in error.problems]
        raise InvalidParams(renamed) from error
    except PagodaError as error:
        if error.param is None or error.param not in names:
            raise
        raise PagodaError(error.code, error.message, names[error.param]) from error
