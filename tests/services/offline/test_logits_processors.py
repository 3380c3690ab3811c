"""A caller's function changes the logits of its own request, and affects no other request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pagoda import LLM, GenerationFailed, SamplingParams
from pagoda_proto.errors import ErrorCode, PagodaError

PROMPTS = ["The sky is", "Hello"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_gib=0.1) as llm:
        yield llm


def counting(outputs: list[int], logits: Any) -> Any:
    """Its n-th output is token 40 + n."""
    changed = np.full_like(logits, -np.inf)
    changed[40 + len(outputs)] = 1.0
    return changed


def tokens(llm: LLM, params: SamplingParams = GREEDY, processors: Any = None) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params, logits_processors=processors)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_what_it_returns_is_chosen_from(llm: LLM) -> None:
    params = SamplingParams(temperature=1.3, max_tokens=5, n=2, seed=3)
    assert tokens(llm, params, counting) == [[[40, 41, 42, 43, 44]] * 2] * 2


def test_each_prompt_may_have_its_own(llm: LLM) -> None:
    plain = tokens(llm)
    assert tokens(llm, processors=[None, counting]) == [plain[0], [list(range(40, 52))]]
    assert tokens(llm, processors=lambda outputs, logits: logits) == plain


def test_it_sees_each_position_once_with_the_outputs_before_it(llm: LLM) -> None:
    seen: list[list[int]] = []

    def watching(outputs: list[int], logits: Any) -> Any:
        assert logits.shape == (llm.vocab_size,)
        seen.append(outputs)
        return logits

    (found,) = llm.generate(PROMPTS[:1], GREEDY, logits_processors=watching)
    ids = found.outputs[0].token_ids
    assert seen == [ids[:i] for i in range(len(ids))]


def test_other_parameters_come_after_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={77: 100.0}, allowed_token_ids=(40, 41, 42, 77))
    assert tokens(llm, params, lambda outputs, logits: np.zeros_like(logits)) == [[[77] * 3]] * 2
    (first, _) = llm.generate(PROMPTS, GREEDY, logits_processors=counting)
    assert first.outputs[0].cumulative_logprob == 0.0  # only one token was left


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (lambda outputs, logits: 1 / len(outputs[3:]), "ZeroDivisionError"),
        (lambda outputs, logits: logits[:5], "shape"),
        (lambda outputs, logits: None, "logits"),
    ],
)
def test_one_that_fails_ends_its_own_request(llm: LLM, processor: Any, says: str) -> None:
    plain = tokens(llm)
    with pytest.raises(GenerationFailed, match=says) as failed:
        llm.generate(PROMPTS, GREEDY, logits_processors=[processor, None])
    assert failed.value.code is ErrorCode.INVALID_ARGUMENT
    assert failed.value.outputs[0] is None
    assert failed.value.outputs[1] is not None
    assert [choice.token_ids for choice in failed.value.outputs[1].outputs] == plain[1]


def test_there_is_one_for_all_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(PagodaError, match="logits_processors"):
        llm.generate(PROMPTS, GREEDY, logits_processors=[counting])
