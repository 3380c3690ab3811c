"""Sampling parameters of a request body. The rules are in `pagoda_proto.params`, one set for all doors."""

from __future__ import annotations

from typing import Any

from pagoda_gateway.api.schemas import ChatRequest, CompletionRequest, Sampling
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import MAX_N, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
_SAME_NAME = (
    "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs",
)  # fmt: skip


def chat_params(text: ModelText, request: ChatRequest) -> SamplingParams:
    """Raises InvalidParams."""
    return sampling_params(
        request,
        text,
        n=1 if request.n is None else request.n,
        max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def completion_params(text: ModelText, request: CompletionRequest) -> SamplingParams:
    """`best_of` is what runs, ranked by the log-probabilities it therefore asks for. Raises InvalidParams."""
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of > MAX_N:
        raise InvalidParams([Problem("best_of", f"must be at most {MAX_N}, got {request.best_of}")])
    ranked = request.best_of is not None and request.best_of > n
    echoed = request.logprobs if request.echo else None
    asked = [value for value in (request.prompt_logprobs, echoed) if value is not None]
    return sampling_params(
        request,
        text,
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


def sampling_params(
    request: Sampling, text: ModelText, *, n: int, max_tokens: int | None, logprobs: int | None, **overrides: Any
) -> SamplingParams:
    """The request's values, else the model author's defaults, else OpenAI's. Raises InvalidParams."""
    fields: dict[str, Any] = dict(text.sampling_defaults)
    fields |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    fields["top_k"] = int(fields.get("top_k", 0))
    stop: Any = () if request.stop is None else request.stop
    return SamplingParams(
        **fields | overrides,
        n=n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        seed=request.seed,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words_token_ids=text.bad_words(request.bad_words or ()),
    )
