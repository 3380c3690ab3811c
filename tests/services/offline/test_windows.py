"""Layers that keep only their window: far beyond it, tokens equal transformers', whatever happens to blocks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.services.offline.conftest import Saved
from tests.worker.models.checkpoints import VOCAB

from pagoda import LLM, SamplingParams

NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SEARCH = SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=20)
TIGHT = {  # windows of 40 tokens, or chunks of 32; 26 blocks hold the longest row, and beside it hardly another one
    "dtype": "float32", "threads": 1, "block_size": 16, "max_model_len": 400, "num_blocks": 28,
    "max_tokens_per_step": 32, "chunk_size": 24,
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Two prompts that begin alike and are many windows long, and some others."""
    generator = torch.Generator().manual_seed(3)
    long, other, short = (torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (300, 100, 17))
    return [long, long[:200] + other, other, short, other[:50]]


def agrees(model: Any, prompt: list[int], continuation: list[int]) -> bool:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + continuation[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == continuation


def tokens(llm: LLM, given: list[list[int]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    found = llm.generate(given, params, use_tqdm=False)
    return [[one.token_ids for one in output.outputs] for output in found]


SWAPS = {"swap_space_gib": 0.01, "preemption": "swap", "chunk_size": 7}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("gemma3", [SWAPS | {"speculation": "suffix"}, {"kv_retention": "all"}]),
        ("gemma2", [SWAPS | {"speculation": "draft-model"}]),
        ("mistral", [SWAPS]),
        ("llama4", [SWAPS | {"speculation": "suffix"}]),
    ],
)
def test_far_beyond_the_window_the_tokens_are_those_of_transformers(
    name: str, others: list[dict[str, Any]], saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """With prefix hits, both ways of preemption, beams, drafts, and prompts split anywhere."""
    model, path = saved(name)
    with caplog.at_level(logging.INFO), LLM(str(path), **TIGHT) as llm:
        together, beams = tokens(llm, prompts()), tokens(llm, prompts()[2:], SEARCH)
        for prompt, (continuation,) in zip(prompts(), together, strict=True):
            assert agrees(model, prompt, continuation)
        assert tokens(llm, prompts()) == together
        turn = [prompts()[0] + together[0][0] + [7, 8, 9]]
        next_turn = tokens(llm, turn)
    assert f"for layers that keep the last {32 if name == 'llama4' else 40} tokens" in caplog.text
    for options in others:
        draft = {"draft_model": str(path)} if options.get("speculation") == "draft-model" else {}
        with LLM(str(path), **(TIGHT | options | draft)) as llm:
            assert tokens(llm, prompts()) == together
            assert tokens(llm, prompts()[2:], SEARCH) == beams
            assert tokens(llm, turn) == next_turn
