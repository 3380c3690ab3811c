"""Parameters for models that pool a prompt instead of continuing it, validated in one place for every interface.

    embed        one vector of the whole prompt
    token_embed  a vector of each of its tokens, in order
    classify     the scores of a head over the model's labels
    max_sim      the late-interaction score of a pair of texts; see `pagoda_proto.pooling.late`

The worker pools hidden states as the model's files specify; the parameters here are those that a request may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import MAX_TOKENS_CEILING, ModelLimits

EMBED, TOKEN_EMBED, CLASSIFY, MAX_SIM = "embed", "token_embed", "classify", "max_sim"
OUTPUTS = (EMBED, TOKEN_EMBED, CLASSIFY, MAX_SIM)
MAX_POOLED_BYTES = 4 * 1024 * 1024
"""Limit for one answer: a frame holds several."""
FLOAT_BYTES = 4


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to read a prompt. None: as the model's files say.

    Attributes:
        output: One of OUTPUTS.
        normalize: Whether vectors have length 1.
        activate: Whether scores go through the model's activation (a sigmoid, a softmax).
        dimensions: Length to which each vector is truncated, before any normalisation; 0 for full length.
        second_start: Where the second text of a pair begins in the prompt; 0 if there is one text.
        unseen: How many tokens at the end of the first text no token attends to: they pad a query.
        skip: How many leading tokens are read, but left out of a mean: an instruction, for models that say so.
    """

    output: str = EMBED
    normalize: bool | None = None
    activate: bool | None = None
    dimensions: int = 0
    second_start: int = 0
    skip: int = 0
    unseen: int = 0

    def __post_init__(self) -> None:
        problems = list(_own_problems(self))
        if problems:
            raise InvalidParams(problems)


def _own_problems(params: PoolingParams) -> Iterator[Problem]:
    if params.output not in OUTPUTS:
        yield Problem("output", f"must be one of {', '.join(OUTPUTS)}, got {params.output[:64]!r}")
    for name in ("dimensions", "second_start", "skip", "unseen"):
        if not 0 <= getattr(params, name) <= MAX_TOKENS_CEILING:
            yield Problem(name, f"must be between 0 and {MAX_TOKENS_CEILING}, got {getattr(params, name)}")
    if params.output in (CLASSIFY, MAX_SIM) and (params.dimensions or params.normalize is not None):
        name = "dimensions" if params.dimensions else "normalize"
        yield Problem(name, f"applies to embeddings only, but the output is {params.output}")
    if params.output != CLASSIFY and params.activate is not None:
        yield Problem("activate", f"applies to scores only, but the output is {params.output}")


def answer_bytes(params: PoolingParams, num_tokens: int, width: int) -> int:
    """Most bytes that the output for a prompt of `num_tokens` takes. `width`: length of a vector; 0: unknown."""
    vectors = num_tokens if params.output == TOKEN_EMBED else 1
    numbers = vectors * (params.dimensions or width)
    return min(numbers * FLOAT_BYTES or MAX_POOLED_BYTES, MAX_POOLED_BYTES)


class Readings(msgspec.Struct, frozen=True):
    """The outputs of a model that pools, and the length of its vectors. No outputs: the model generates."""

    outputs: tuple[str, ...] = ()
    width: int = 0


GENERATES = Problem("task", "this model generates text; it has no embeddings and no scores")


def check_pooling(
    params: PoolingParams, prompt_token_ids: Sequence[int], limits: ModelLimits, readings: Readings
) -> None:
    """Validate against the model.

    Raises:
        InvalidParams: it has no such output, an id is outside the vocabulary, or the prompt is empty.
        PagodaError: CONTEXT_LENGTH_EXCEEDED if the prompt does not fit.
    """
    problems = list(_model_problems(params, prompt_token_ids, limits, readings))
    if problems:
        raise InvalidParams(problems)
    if len(prompt_token_ids) > limits.max_model_len:
        raise prompt_too_long(limits.max_model_len, len(prompt_token_ids), "input")


def _model_problems(
    params: PoolingParams, ids: Sequence[int], limits: ModelLimits, readings: Readings
) -> Iterator[Problem]:
    if not readings.outputs:
        yield GENERATES
    elif params.output not in readings.outputs:
        yield Problem("task", f"this model gives {' and '.join(readings.outputs)}, not {params.output}")
    yield from _late_problems(params, len(ids), readings)
    if params.dimensions > readings.width > 0:
        yield Problem("dimensions", f"must be at most {readings.width}, got {params.dimensions}")
    if not ids:
        yield Problem("input", "must have at least one token")
    elif not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        bad = next(token for token in ids if not 0 <= token < limits.vocab_size)
        yield Problem("input", f"token ids must be between 0 and {limits.vocab_size - 1}, got {bad}")
    for name in ("second_start", "skip"):
        if ids and getattr(params, name) >= len(ids):
            yield Problem(name, f"must be below the prompt's {len(ids)} tokens, got {getattr(params, name)}")


def _late_problems(params: PoolingParams, length: int, readings: Readings) -> Iterator[Problem]:
    if params.output == MAX_SIM and not params.second_start:
        yield Problem("second_start", "max_sim needs a pair of texts")
    if params.unseen and MAX_SIM not in readings.outputs:
        yield Problem("unseen", "needs a late-interaction model")
    elif params.unseen and params.unseen >= (params.second_start or length):
        yield Problem("unseen", f"must be below the first text's {params.second_start or length} tokens")


def prompt_too_long(max_model_len: int, num_tokens: int, param: str, *, at_least: bool = False) -> PagodaError:
    """`at_least`: the prompt was not counted in full."""
    more = "at least " * at_least
    message = f"This model's maximum context length is {max_model_len} tokens. However, {param} has {more}{num_tokens}."
    return PagodaError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param)
