"""Beam search finds what transformers' finds, over the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.worker.grammars.support import DEMO
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
    """Without the padding behind an end."""
    for place in range(num_prompt, len(tokens)):
        if tokens[place] in ends:
            return tokens[: place + 1]
    return tokens


def test_more_beams_than_there_are_log_probabilities_for_are_refused(llm: LLM) -> None:
    with pytest.raises(PagodaError, match=r"at most .* beams here, got 11"):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=11, max_tokens=4))
