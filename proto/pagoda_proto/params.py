"""What a caller may ask of generation, validated once for every door: HTTP, gRPC, offline.

`SamplingParams` is frozen and complete: defaults are filled in, and construction fails with *all* problems at once.
What can be checked only against a model (ids against the logits' width, lengths against the context) is in
`model_problems`; the engine core runs it again, because it is the last to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem

MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_TOKENS_CEILING = 2**31 - 1
# Who wants to be late may be as late as he likes; the lower bound is how far anybody gets before others.
MIN_PRIORITY, MAX_PRIORITY = -100, 2**31 - 1
# What one step computes at most, unless told otherwise: an engine core sends no more, a worker reserves memory for it.
DEFAULT_MAX_TOKENS_PER_STEP = 2048


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to continue a prompt.

    Attributes:
        n: Choices to generate from the one prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all, and so does -1.
        top_p: Of what min_p and top_k keep, keep the smallest set of tokens whose share reaches p.
        min_p: Drop tokens less likely than min_p times the most likely one.
        repetition_penalty: > 1 discourages tokens seen in prompt or output (CTRL, arXiv 1909.05858).
        presence_penalty: Subtracted once from the logit of a token already in the output.
        frequency_penalty: Subtracted per occurrence in the output.
        seed: 64-bit, negative ones count from 2^64 down; None lets admission draw one and write it into the record.
        max_tokens: Most output tokens per choice; None means up to the context length.
        min_tokens: No end of sequence and no stop token before this many output tokens.
        stop: Strings that end a choice, or one; handled by the text side, which then aborts the choice.
        stop_token_ids: Tokens that end a choice.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        logit_bias: Added to the logits of these token ids.
        allowed_token_ids: If given, nothing else can be sampled.
        bad_words_token_ids: Token sequences that must not appear in the output.
        logprobs: Report the sampled token's log-probability and this many of the most likely; None reports nothing.
        prompt_logprobs: The same for the prompt's own tokens.
        include_stop_str_in_output: Keep the stop string that ended the text.
        skip_special_tokens: Leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, value in _one_form(self):
            msgspec.structs.force_setattr(self, name, value)
        problems = list(_own_problems(self))
        if problems:
            raise InvalidParams(problems)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _one_form(p: SamplingParams) -> Iterator[tuple[str, object]]:
    """What several values say alike has one form inside, whichever door it came through."""
    if isinstance(p.stop, str):
        yield "stop", (p.stop,)
    elif not isinstance(p.stop, tuple):
        yield "stop", tuple(p.stop)
    if p.top_k == -1:
        yield "top_k", 0
    if p.seed is not None and MIN_SEED <= p.seed < 0:
        yield "seed", p.seed & MAX_SEED


def _in_range(name: str, value: float, low: float, high: float) -> Iterator[Problem]:
    if not low <= value <= high:  # also false for a NaN
        yield Problem(name, f"must be between {low} and {high}, got {value}")


def _at_most(name: str, what: str, count: int, limit: int) -> Iterator[Problem]:
    if count > limit:
        yield Problem(name, f"at most {limit} {what} are allowed, got {count}")


def _own_problems(p: SamplingParams) -> Iterator[Problem]:
    yield from _in_range("n", p.n, 1, MAX_N)
    yield from _in_range("temperature", p.temperature, 0, 100)
    yield from _in_range("top_k", p.top_k, 0, MAX_TOKENS_CEILING)
    if not 0 < p.top_p <= 1:
        yield Problem("top_p", f"must be above 0 and at most 1, got {p.top_p}")
    yield from _in_range("min_p", p.min_p, 0, 1)
    if not 0 < p.repetition_penalty <= 100:
        yield Problem("repetition_penalty", f"must be above 0 and at most 100, got {p.repetition_penalty}")
    yield from _in_range("presence_penalty", p.presence_penalty, -2, 2)
    yield from _in_range("frequency_penalty", p.frequency_penalty, -2, 2)
    if p.seed is not None:
        yield from _in_range("seed", p.seed, MIN_SEED, MAX_SEED)
    yield from _length_problems(p)
    yield from _list_problems(p)


def _length_problems(p: SamplingParams) -> Iterator[Problem]:
    if p.max_tokens is not None:
        yield from _in_range("max_tokens", p.max_tokens, 1, MAX_TOKENS_CEILING)
    yield from _in_range("min_tokens", p.min_tokens, 0, MAX_TOKENS_CEILING)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        yield Problem("min_tokens", f"must not exceed max_tokens ({p.max_tokens}), got {p.min_tokens}")
    for name, value in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        if value is not None:
            yield from _in_range(name, value, 0, MAX_LOGPROBS)


def _list_problems(p: SamplingParams) -> Iterator[Problem]:
    yield from _at_most("stop", "stop strings", len(p.stop), MAX_STOP_STRINGS)
    for text in p.stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            yield Problem("stop", f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}")
    yield from _at_most("stop_token_ids", "token ids", len(p.stop_token_ids), MAX_STOP_TOKEN_IDS)
    yield from _at_most("allowed_token_ids", "token ids", len(p.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
    yield from _at_most("logit_bias", "entries", len(p.logit_bias), MAX_LOGIT_BIAS)
    for token_id, bias in p.logit_bias.items():
        yield from _in_range(f"logit_bias[{token_id}]", bias, -100, 100)
    yield from _at_most("bad_words", "bad words", len(p.bad_words_token_ids), MAX_BAD_WORDS)
    yield from _at_most("bad_words", "tokens", sum(map(len, p.bad_words_token_ids)), MAX_BAD_WORD_TOKENS)
    if any(not word for word in p.bad_words_token_ids):
        yield Problem("bad_words", "a bad word must have at least one token")


class ModelLimits(msgspec.Struct, frozen=True):
    """The facts of a model that requests are checked against. `vocab_size` is the width of the logits."""

    vocab_size: int
    max_model_len: int


def model_problems(params: SamplingParams, prompt_token_ids: list[int], limits: ModelLimits) -> list[Problem]:
    """What is wrong with this request for this model; empty when it can run."""
    problems: list[Problem] = []
    lists: Mapping[str, tuple[int, ...] | list[int]] = {
        "prompt": prompt_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "bad_words": tuple(token for word in params.bad_words_token_ids for token in word),
    }
    for name, ids in lists.items():
        if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            bad = next(token for token in ids if not 0 <= token < limits.vocab_size)
            problems.append(Problem(name, f"token ids must be between 0 and {limits.vocab_size - 1}, got {bad}"))
    if not prompt_token_ids:
        problems.append(Problem("prompt", "must have at least one token"))
    return problems


def check_for_model(params: SamplingParams, prompt_token_ids: list[int], limits: ModelLimits) -> int:
    """Validate against the model and return the most output tokens a choice may have.

    Raises:
        InvalidParams: an id is outside the vocabulary, or the prompt is empty.
        PagodaError: CONTEXT_LENGTH_EXCEEDED when prompt and requested output do not fit.
    """
    problems = model_problems(params, prompt_token_ids, limits)
    if problems:
        raise InvalidParams(problems)
    room = limits.max_model_len - len(prompt_token_ids)
    wanted = params.max_tokens
    if room < 1 or (wanted is not None and wanted > room) or params.min_tokens > room:
        asked = f"{wanted if wanted is not None else max(1, params.min_tokens)} output tokens"
        raise PagodaError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"this model's context is {limits.max_model_len} tokens; the prompt has {len(prompt_token_ids)} "
            f"and {asked} were requested",
            "max_tokens" if room >= 1 else "prompt",
        )
    return room if wanted is None else wanted
