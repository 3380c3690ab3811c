"""Native models against transformers: the same greedy tokens in float32, close log-probabilities in bfloat16.

Greedy tokens are compared by giving transformers our continuation: its choice after every prefix must be the token that
follows, which is what generating token by token would give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.worker.models.checkpoints import NATIVE, SLIDING, prompts
from tests.worker.models.conftest import Loaded, Saved
from tests.worker.models.harness import Harness, logits_of

NEW_TOKENS = 24
# Mean and largest difference between bfloat16 and float32 log-probabilities, in nats; logits here have a standard
# deviation of 1 to 2. transformers in bfloat16 differs by as much.
BF16_MEAN, BF16_MOST = 0.06, 0.6
WITH_EXPERTS, MOSTLY = (
    {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe", "gpt_oss", "glm4_moe", "llama4"}
    | {"llama4_dense", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"}  # all but one layer of the first are dense
    | {"granite4_moe", "granite_moe_shared"},
    0.75,
)


def choices_of(model: Any, prompt: list[int], continuation: list[int]) -> list[int]:
    """The token that transformers chooses after the prompt and after each continuation token but the last."""
    ids = torch.tensor([prompt + continuation[:-1]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    return [int(token) for token in logits[len(prompt) - 1 :].argmax(-1)]


@pytest.mark.parametrize("name", [*NATIVE, *SLIDING])
def test_greedy_tokens_are_those_of_transformers(name: str, saved: Saved, loaded: Loaded) -> None:
    model, _ = saved(name)
    harness = Harness(loaded(name), num_blocks=128)
    together = harness.greedy(prompts(), NEW_TOKENS)
    for prompt, continuation in zip(prompts(), together, strict=True):
        assert choices_of(model, prompt, continuation) == continuation
    assert len({token for continuation in together for token in continuation}) > 20, "a model that says nothing"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_alone_and_in_chunks_the_tokens_are_the_same(name: str, loaded: Loaded) -> None:
    harness = Harness(loaded(name), num_blocks=128)
    together = harness.greedy(prompts(), 8)
    assert [harness.greedy([prompt], 8)[0] for prompt in prompts()] == together
    for chunk in (16, 64):
        assert harness.greedy(prompts(), 8, chunk) == together


@pytest.mark.parametrize(("name", "kernels"), [*((name, "torch") for name in NATIVE), ("gemma3", "reference")])
def test_bfloat16_log_probabilities_are_close(name: str, kernels: str, saved: Saved, loaded: Loaded) -> None:
    tokens = prompts()[-1]
    with torch.no_grad():
        expected = saved(name)[0](input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    got = logits_of(loaded(name, "bfloat16", kernels), tokens, [len(tokens)]).log_softmax(-1)
    difference = (got - expected).abs()
    if name in WITH_EXPERTS:  # rounding may route a token near a tie to the other expert, in transformers too
        difference = difference[difference.amax(-1).argsort()[: round(MOSTLY * len(tokens))]]
    assert difference.mean() < BF16_MEAN
    assert difference.max() < BF16_MOST
