"""Sampling parameters, validated in one place for every interface: HTTP, gRPC, offline.

`SamplingParams` is frozen and complete: defaults are filled in, and construction fails with *all* problems at once, or
with all wrong types if there are any.
A parameter is declared here and once in each wire format: engine.proto, and a dialect's body if its form differs there.
Checks that need the model (ids against the width of the logits, lengths against the context) are in `model_problems`;
the engine core runs them again, because it is the last tier that knows the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

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
MAX_GRAMMAR_CHARS = 128 * 1024  # each row of a request carries a copy to the worker
MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_TOKENS_CEILING = 2**31 - 1
MIN_PRIORITY, MAX_PRIORITY = -100, 10**9  # in bodies; the lower bound limits how far a client gets ahead
BACKGROUND_PRIORITY = 2**30  # from here on no client waits: runs only behind all others
LAST_PRIORITY = 2**31 - 1
# Most tokens in a step by default: an engine core sends no more, and a worker reserves memory for them.
DEFAULT_MAX_TOKENS_PER_STEP = 2048


def in_background(priority: int) -> int:
    """The priority of a background request: behind all live ones, ordered by the `priority` of its body."""
    return BACKGROUND_PRIORITY + priority - MIN_PRIORITY


class Parameter(NamedTuple):
    """The definition of a field for all interfaces: what it does, and which values it may have."""

    about: str
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # `low` itself is excluded

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)  # False for NaN

    @property
    def rule(self) -> str:
        if self.above:
            return f"above {self.low} and at most {self.high}"
        return f"between {self.low} and {self.high}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to continue a prompt. A number that is None is not set."""

    n: Annotated[int, Parameter("choices to generate from the one prompt", 1, MAX_N)] = 1
    temperature: Annotated[float, Parameter("0 is greedy; otherwise logits are divided by it", 0, 100)] = 1.0
    top_k: Annotated[int, Parameter("keep the k most likely tokens; 0 and -1 keep all", 0, MAX_TOKENS_CEILING)] = 0
    top_p: Annotated[
        float, Parameter("of what min_p and top_k keep, the smallest set of tokens whose share reaches p", 0, 1, True)
    ] = 1.0
    min_p: Annotated[float, Parameter("drop tokens less likely than min_p times the most likely one", 0, 1)] = 0.0
    repetition_penalty: Annotated[
        float, Parameter("above 1 discourages tokens seen in prompt or output (arXiv 1909.05858)", 0, 100, True)
    ] = 1.0
    presence_penalty: Annotated[
        float, Parameter("subtracted once from the logit of a token already in the output", -2, 2)
    ] = 0.0
    frequency_penalty: Annotated[float, Parameter("subtracted per occurrence of the token in the output", -2, 2)] = 0.0
    seed: Annotated[
        int | None, Parameter("negative seeds count down from 2^64; absent: drawn at admission", MIN_SEED, MAX_SEED)
    ] = None
    max_tokens: Annotated[
        int | None, Parameter("most output tokens per choice; absent: up to the context length", 1, MAX_TOKENS_CEILING)
    ] = None
    min_tokens: Annotated[
        int, Parameter("no end of sequence and no stop token before this many output tokens", 0, MAX_TOKENS_CEILING)
    ] = 0
    stop: Annotated[
        tuple[str, ...],
        Parameter("strings that end a choice, or one; the text side finds them, then aborts the choice"),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter("tokens that end a choice")] = ()
    ignore_eos: Annotated[bool, Parameter("do not end at the model's end-of-sequence tokens")] = False
    logit_bias: Annotated[dict[int, float], Parameter("added to the logits of these token ids", -100, 100)] = {}
    allowed_token_ids: Annotated[tuple[int, ...], Parameter("if given, nothing else can be sampled")] = ()
    bad_words_token_ids: Annotated[
        tuple[tuple[int, ...], ...], Parameter("token sequences that must not appear in the output")
    ] = ()
    logprobs: Annotated[
        int | None, Parameter("report logprobs of the sampled token and of this many most likely ones", 0, MAX_LOGPROBS)
    ] = None
    prompt_logprobs: Annotated[int | None, Parameter("the same for the prompt's own tokens", 0, MAX_LOGPROBS)] = None
    grammar: Annotated[
        str, Parameter("what the output must look like, as llguidance reads it; see pagoda_proto.grammars")
    ] = ""
    use_beam_search: Annotated[
        bool, Parameter("the n likeliest sequences that a search with n beams finds, instead of n sampled ones")
    ] = False
    length_penalty: Annotated[
        float, Parameter("in a beam search, log-probability sums are divided by length to this power", -10, 10)
    ] = 1.0
    include_stop_str_in_output: Annotated[bool, Parameter("keep the stop string that ended the text")] = False
    skip_special_tokens: Annotated[bool, Parameter("leave special tokens out of the text")] = True

    def __post_init__(self) -> None:
        problems = list(_settled(self)) or list(_own_problems(self))
        if problems:
            raise InvalidParams(problems)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _parameters() -> dict[str, Parameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in SamplingParams.__struct_fields__}


PARAMETERS = _parameters()  # by name
SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n\n    Attributes:\n" + "".join(
    f"        {name}: {parameter.about[0].upper()}{parameter.about[1:]}.\n" for name, parameter in PARAMETERS.items()
)
# Fields that a beam search uses, or that do not concern it; all others would have no effect on it.
OF_BEAMS = frozenset(
    {"n", "use_beam_search", "length_penalty", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "seed"}
    | {"include_stop_str_in_output", "skip_special_tokens"}
)
# All other fields, with their defaults. Every step of a search sends its parameters once per beam.
_NOT_OF_BEAMS = tuple(
    (field.name, field.default if field.default is not msgspec.NODEFAULT else field.default_factory())
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in OF_BEAMS | {"temperature"}
)
# Numbers and flags that every request has; they pass from the client to the sampler unchanged.
PLAIN = tuple(field.name for field in msgspec.structs.fields(SamplingParams) if isinstance(field.default, int | float))


def _usual(hint: Any) -> frozenset[type]:
    """The usual types of a number, flag or text; msgspec checks all other values, and those in lists."""
    return frozenset(get_args(hint) or {hint}) if get_origin(hint) in (None, UnionType) else frozenset()


# Per field: name, usual types, full type, and its kind of collection, of which an empty one is usual.
_USUAL = tuple((name, _usual(hint), hint, get_origin(hint)) for name, hint in get_type_hints(SamplingParams).items())


def _settled(p: SamplingParams) -> Iterator[Problem]:
    """Convert equivalent values to one form, whichever interface they came through; other types are problems."""
    for name, usual, hint, kind in _USUAL:
        value = getattr(p, name)
        if type(value) in usual or (type(value) is kind and not value):
            continue
        try:
            value = value if usual else _listed(value, kind)
            msgspec.structs.force_setattr(p, name, _converted(value, hint))
        except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
            yield Problem(name, f"is of the wrong type: {error}")
    if isinstance(p.top_k, int) and p.top_k == -1:
        msgspec.structs.force_setattr(p, "top_k", 0)
    if isinstance(p.seed, int) and MIN_SEED <= p.seed < 0:
        msgspec.structs.force_setattr(p, "seed", p.seed & MAX_SEED)


def _listed(value: Any, kind: Any) -> Any:
    """None becomes an empty collection and a text a list of one; anything else that is no list is refused later."""
    if value is None:
        return kind()
    if kind is dict:
        return value
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, bytes) else value


def _converted(value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return msgspec.convert(_plain(value), hint)


def _plain(value: Any) -> Any:
    """Convert numbers of numpy, torch or subclasses of float to plain ones, also inside lists."""
    if callable(plain := getattr(value, "tolist", None)):
        return plain()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return float(value) if isinstance(value, float) else value


def _at_most(name: str, what: str, count: int, limit: int) -> Iterator[Problem]:
    if count > limit:
        yield Problem(name, f"at most {limit} {what} are allowed, got {count}")


def _own_problems(p: SamplingParams) -> Iterator[Problem]:
    for name, parameter in PARAMETERS.items():
        value = getattr(p, name)
        if isinstance(value, int | float) and not parameter.allows(value):
            yield Problem(name, f"must be {parameter.rule}, got {value}")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        yield Problem("min_tokens", f"must not exceed max_tokens ({p.max_tokens}), got {p.min_tokens}")
    if len(p.grammar) > MAX_GRAMMAR_CHARS:
        yield Problem("grammar", f"at most {MAX_GRAMMAR_CHARS} characters are allowed, got {len(p.grammar)}")
    if p.grammar and p.ignore_eos:
        yield Problem("ignore_eos", "cannot be used with a grammar, which ends with an end of sequence")
    yield from _list_problems(p)
    yield from _beam_problems(p)


def _beam_problems(p: SamplingParams) -> Iterator[Problem]:
    if not p.use_beam_search:
        if p.length_penalty != 1.0:
            yield Problem("length_penalty", "needs use_beam_search: true")
        return
    for name, empty in _NOT_OF_BEAMS:
        if getattr(p, name) != empty:
            yield Problem(name, "cannot be combined with use_beam_search")
    if p.temperature not in (0.0, 1.0):
        yield Problem("temperature", "must be 0 or 1 with use_beam_search")


def num_candidates(p: SamplingParams, num_ends: int) -> int:
    """How many candidates each beam of a search must report: a token behind that many of its own beam is behind `n`
    that continue. Raises InvalidParams if rows do not report that many log-probabilities."""
    count = p.n + num_ends
    if count > MAX_LOGPROBS:
        rule = f"beams and end tokens must be at most {MAX_LOGPROBS} together"
        raise InvalidParams([Problem("n", f"{rule}, got {p.n} and {num_ends}")])
    return count


def _list_problems(p: SamplingParams) -> Iterator[Problem]:
    yield from _at_most("stop", "stop strings", len(p.stop), MAX_STOP_STRINGS)
    for text in p.stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            yield Problem("stop", f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}")
    yield from _at_most("stop_token_ids", "token ids", len(p.stop_token_ids), MAX_STOP_TOKEN_IDS)
    yield from _at_most("allowed_token_ids", "token ids", len(p.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
    yield from _at_most("logit_bias", "entries", len(p.logit_bias), MAX_LOGIT_BIAS)
    for token_id, bias in p.logit_bias.items():
        if not (parameter := PARAMETERS["logit_bias"]).allows(bias):
            yield Problem(f"logit_bias[{token_id}]", f"must be {parameter.rule}, got {bias}")
    yield from _at_most("bad_words", "bad words", len(p.bad_words_token_ids), MAX_BAD_WORDS)
    yield from _at_most("bad_words", "tokens", sum(map(len, p.bad_words_token_ids)), MAX_BAD_WORD_TOKENS)
    if any(not word for word in p.bad_words_token_ids):
        yield Problem("bad_words", "a bad word must have at least one token")


class ModelLimits(msgspec.Struct, frozen=True):
    """The facts of a model that requests are checked against. `vocab_size` is the width of the logits."""

    vocab_size: int
    max_model_len: int


def model_problems(params: SamplingParams, prompt_token_ids: list[int], limits: ModelLimits) -> list[Problem]:
    """What is wrong with this request for this model; empty if it can run."""
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
        PagodaError: CONTEXT_LENGTH_EXCEEDED if prompt and requested output do not fit.
    """
    problems = model_problems(params, prompt_token_ids, limits)
    if problems:
        raise InvalidParams(problems)
    room = limits.max_model_len - len(prompt_token_ids)
    wanted = params.max_tokens
    if room < 1 or (wanted is not None and wanted > room) or params.min_tokens > room:
        asked = wanted if wanted is not None else max(1, params.min_tokens)
        raise too_long(limits.max_model_len, len(prompt_token_ids), asked, "max_tokens" if room >= 1 else "prompt")
    return room if wanted is None else wanted


def too_long(
    max_model_len: int, num_prompt_tokens: int, asked: int, param: str, *, at_least: bool = False
) -> PagodaError:
    """The wording is OpenAI's, because some clients search for it. `at_least`: the prompt was not counted in full."""
    more = "at least " * at_least
    parts = f"{more}{num_prompt_tokens} in the prompt, {asked} in the completion"
    return PagodaError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{more}{num_prompt_tokens + asked} tokens ({parts}). "
        "Please reduce the length of the prompt or completion.",
        param,
    )
