"""The whole offline path against transformers: scheduler, blocks, prefix cache, chunks, sampler, every native family.

Greedy, float32. transformers gets our continuation and must choose each of its tokens after the preceding ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from tests.services.offline.conftest import Saved
from tests.worker.models.checkpoints import NATIVE, prompts

from pagoda import LLM, SamplingParams

NEW_TOKENS = 48  # even with the shortest prompt, longer than any window
AGAIN = 16  # of them are left out of the second prompt, which fills whole blocks if the first did
ENOUGH = 4  # of those are compared: the first reads all that was kept; one, for a prompt of 47 tokens, begins a block


@pytest.fixture(scope="module")
def agrees(saved: Saved) -> Callable[[str, list[int], list[int]], bool]:
    """All ways should give the same tokens, so transformers is asked only once."""

    @functools.cache
    def asked(name: str, prompt: tuple[int, ...], continuation: tuple[int, ...]) -> bool:
        with torch.no_grad():
            logits = saved(name)[0](input_ids=torch.tensor([prompt + continuation[:-1]])).logits[0]
        return tuple(logits[len(prompt) - 1 :].argmax(-1).tolist()) == continuation

    return lambda name, prompt, continuation: asked(name, tuple(prompt), tuple(continuation))


def continuations(llm: LLM, given: list[list[int]], count: int) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(given, greedy, use_tqdm=False)]


WAYS = [(16, True), (2048, False), (16, False), (64, True), (2048, True)]  # chunk size, prefix cache
IN_ALL_WAYS = ("llama", "gemma3", "gpt2", "mixtral", "gpt_oss", "deepseek_v3")  # others differ only inside the model


@pytest.mark.parametrize(
    ("name", "chunk_size", "prefix_cache"),
    [(name, *way) for name in NATIVE for way in (WAYS if name in IN_ALL_WAYS else WAYS[:2])],
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, chunk_size: int, prefix_cache: bool, saved: Saved, agrees: Callable[[str, list[int], list[int]], bool]
) -> None:
    _, path = saved(name)
    options = {
        "dtype": "float32",
        "chunk_size": chunk_size,
        "prefix_cache": prefix_cache,
        "num_blocks": 256,
        "threads": 1,
    }
    with LLM(str(path), **options) as llm:
        together = continuations(llm, prompts(), NEW_TOKENS)
        for prompt, continuation in zip(prompts(), together, strict=True):
            assert len(continuation) == NEW_TOKENS
            assert agrees(name, prompt, continuation)
        begun = [prompt + found[:-AGAIN] for prompt, found in zip(prompts(), together, strict=True)]
        rests = [found[-AGAIN:][:ENOUGH] for found in together]
        assert continuations(llm, begun, ENOUGH) == rests  # a prefix hit, if there is a prefix cache
        assert continuations(llm, begun[-1:], ENOUGH) == rests[-1:]
