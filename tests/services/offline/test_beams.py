"""Beam search on the demo model finds what transformers' beam search finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.gguf_files import DEMO
from transformers import AutoModelForCausalLM

from pagoda import LLM
from pagoda.offline.beams import BeamSearchParams
from pagoda_proto.errors import PagodaError

PROMPTS = ["The sky is", "Hello"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_gib=0.1, dtype="float32", kernels="torch") as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (2, 1.0), (4, 0.0), (4, 2.0), (5, -1.0)])
def test_it_finds_what_transformers_finds(llm: LLM, oracle: torch.nn.Module, width: int, length_penalty: float) -> None:
    ends = list(llm._local.text.eos_token_ids)
    params = BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=length_penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = llm.tokenize(prompt)
        with torch.inference_mode():
            expected = oracle.generate(  # type: ignore[operator]
                torch.tensor([ids]), num_beams=width, num_return_sequences=width, max_new_tokens=12, do_sample=False,
                length_penalty=length_penalty, early_stopping=False, eos_token_id=ends, pad_token_id=ends[0],
                repetition_penalty=1.0, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        found = [sequence.tokens for sequence in output.sequences]
        assert found == [_trimmed(row, len(ids), ends) for row in expected.sequences.tolist()]
        if width > 1:
            scores = [sequence.score for sequence in output.sequences]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)


def _trimmed(tokens: list[int], num_prompt: int, ends: list[int]) -> list[int]:
    """The output tokens without the padding behind an end token."""
    for place in range(num_prompt, len(tokens)):
        if tokens[place] in ends:
            return tokens[: place + 1]
    return tokens


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"beam_width": 17}, r"n: must be between 1 and 16, got 17"),
        ({"length_penalty": 11.0}, r"length_penalty: must be between -10 and 10"),
        ({"max_tokens": 0}, r"max_tokens: must be between 1 and"),
    ],
)
def test_a_search_that_cannot_be_is_refused(llm: LLM, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PagodaError, match=says):
        llm.beam_search(PROMPTS, BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields)))


def test_beams_are_as_wide_as_choices_may_be(llm: LLM) -> None:
    (found,) = llm.beam_search("Hello", BeamSearchParams(beam_width=16, max_tokens=3))
    assert len({tuple(sequence.tokens) for sequence in found.sequences}) == 16
    scores = [sequence.score for sequence in found.sequences]
    assert scores == sorted(scores, reverse=True)
    assert [one.cum_logprob for one in found.sequences] == [
        one.score * (len(one.tokens) - len(llm.tokenize("Hello"))) for one in found.sequences
    ]


def test_company_changes_nothing(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    alone = [llm.beam_search(prompt, params)[0] for prompt in PROMPTS]
    assert llm.beam_search([*PROMPTS, "A dog", *PROMPTS], params)[:2] == alone
