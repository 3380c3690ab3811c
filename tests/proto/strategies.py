"""Hypothesis strategies for every struct that crosses a process boundary: valid, and anywhere within the limits."""

from __future__ import annotations

from hypothesis import strategies as st

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from pagoda_proto.pooling.params import CLASSIFY, EMBED, TOKEN_EMBED, PoolingParams
from pagoda_proto.records import (
    Begun,
    Delta,
    FinishReason,
    Generate,
    LedgerEntry,
    Load,
    Pool,
    Pooled,
    PriorOutput,
    RequestRecord,
    Resume,
    Tokens,
    Usage,
)
from pagoda_proto.steps import TopLogprobs

U32 = st.integers(0, 2**32 - 1)
COUNT = st.integers(0, 2**31 - 1)
TOKENS = st.lists(U32, max_size=3)  # none, one, several; more would only take time to draw
TOKEN_TUPLE = TOKENS.map(tuple)
F32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
F64 = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=8)


def floats(low: float, high: float, *, exclude_min: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=exclude_min, allow_nan=False)


@st.composite
def sampling_params(draw: st.DrawFn, *, text: bool = False, ends: bool = False) -> SamplingParams:
    """`text`: with the fields that stay on the text side. `ends`: none that ignore the end of the sequence."""
    min_tokens = draw(COUNT)
    more = {}
    if text:
        more = {
            "stop": draw(st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple)),
            "include_stop_str_in_output": draw(st.booleans()),
            "skip_special_tokens": draw(st.booleans()),
        }
    return SamplingParams(
        n=draw(st.integers(1, 16)),
        temperature=draw(floats(0, 100)),
        top_k=draw(COUNT),
        top_p=draw(floats(0, 1, exclude_min=True)),
        min_p=draw(floats(0, 1)),
        repetition_penalty=draw(floats(0, 100, exclude_min=True)),
        presence_penalty=draw(floats(-2, 2)),
        frequency_penalty=draw(floats(-2, 2)),
        seed=draw(st.none() | st.integers(0, MAX_SEED)),
        max_tokens=draw(st.none() | st.integers(max(1, min_tokens), 2**31 - 1)),
        min_tokens=min_tokens,
        stop_token_ids=draw(TOKEN_TUPLE),
        ignore_eos=(ignore_eos := not ends and draw(st.booleans())),
        grammar="" if ignore_eos else draw(TEXT),
        logit_bias=draw(st.dictionaries(U32, floats(-100, 100), max_size=2)),
        allowed_token_ids=draw(TOKEN_TUPLE),
        bad_words_token_ids=draw(st.lists(st.lists(U32, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple)),
        logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
        prompt_logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
        **more,
    )


MAYBE = st.none() | st.booleans()
POOLING = st.builds(
    PoolingParams, output=st.sampled_from((EMBED, TOKEN_EMBED)), normalize=MAYBE, dimensions=COUNT,
    second_start=COUNT, skip=COUNT,
) | st.builds(PoolingParams, output=st.just(CLASSIFY), activate=MAYBE)  # fmt: skip


def generating(*, ends: bool = False) -> st.SearchStrategy[Generate]:
    params = sampling_params(ends=ends)
    return st.builds(Generate, params=params, seed=st.integers(0, 2**64 - 1), eos_token_ids=TOKEN_TUPLE)


def records(tasks: st.SearchStrategy[Generate | Pool]) -> st.SearchStrategy[RequestRecord]:
    return st.builds(
        RequestRecord,
        request_id=TEXT,
        prompt_token_ids=TOKENS,
        task=tasks,
        cache_salt=TEXT,
        priority=st.integers(-(2**31), 2**31 - 1),
        queue_timeout_s=F64,
        tenant=TEXT,
        weight=st.integers(1, 2**32 - 1),
        adapter=st.none() | st.builds(Adapter, digest=TEXT, path=TEXT),
    )


RECORDS = records(generating() | st.builds(Pool, pooling=POOLING))
PRIORS = st.builds(PriorOutput, choice=U32, token_ids=TOKENS, finished=st.booleans())
LOGPROBS = st.builds(TopLogprobs, F32, U32, TOKENS, st.lists(F32, max_size=3))
USAGES = st.builds(Usage, prompt_tokens=U32, cached_prompt_tokens=U32, output_tokens=U32, preemptions=U32, replays=U32)
BEGUN = st.none() | st.builds(Begun, model_fingerprint=TEXT, numerics_id=TEXT, cached_prompt_tokens=U32)
RESUMES = st.builds(Resume, prior_outputs=st.lists(PRIORS, max_size=2).map(tuple), begun=BEGUN)
RESULTS = st.builds(Pooled, data=st.binary(max_size=16)) | st.builds(
    Tokens,
    first_index=U32,
    token_ids=TOKENS,
    logprobs=st.none() | st.lists(LOGPROBS, min_size=1, max_size=2),
    prompt_logprobs=st.none() | st.lists(LOGPROBS, min_size=1, max_size=2),
    stop_token_id=st.none() | U32,
    begun=BEGUN,
)
DELTAS = st.builds(
    Delta,
    request_id=TEXT,
    choice=U32,
    result=RESULTS,
    attempt=U32,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error_code=st.none() | st.sampled_from(ErrorCode),
    error_message=TEXT,
    usage=st.none() | USAGES,
    ledger=st.none() | st.lists(st.builds(LedgerEntry, TEXT, F64), min_size=1, max_size=3),
)
LOADS = st.builds(
    Load,
    engine_id=TEXT,
    num_workers=U32,
    num_waiting=U32,
    num_running=U32,
    kv_usage=F64,
    draining=st.booleans(),
    vocab_size=U32,
    max_model_len=U32,
    seconds_since_progress=F64,
    model_fingerprint=TEXT,
    numerics_id=TEXT,
    protocol=U32,
    policy=TEXT,
)
