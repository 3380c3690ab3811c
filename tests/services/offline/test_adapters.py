"""Adapters offline: in any batch, with other adapters or none, preempted or with drafts, requests give the same output
as alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worker.adapters.files import DEMO, RANKS, adapter_of, embedding_factors, spelt, whole_of, write

from pagoda import LLM, AsyncLLM, GenerationFailed, LoRARequest, PagodaError, SamplingParams
from pagoda.settings.problems import ConfigError
from pagoda_worker.checkpoints.spec import matrices_of_all

PROMPTS = [f"User: say something about number {index}, and then about it again.\nAssistant:" for index in range(6)]
NAMES = (None, "one", "two")
SAMPLED = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=40, logprobs=1, ignore_eos=True)
Told = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter for matrices, and one that also adapts the embedding and brings its own norms and output matrix."""
    out = tmp_path_factory.mktemp("adapters")
    found = {name: adapter_of(DEMO, out / name, seed, size=0.08) for seed, name in enumerate(("one", "two"))}
    spec, (path, tensors) = spelt(DEMO), found["two"]
    embed = spec.names.top(spec.names.embed)
    lines = embedding_factors(embed, (spec.vocab_size, spec.hidden_size), 8, size=0.08)
    targets = [name.rpartition(".")[2] for name in (*matrices_of_all(spec), embed)]
    whole = whole_of(DEMO, "norm", "lm_head")
    write(
        path, tensors | lines | whole, target_modules=targets, rank_pattern=RANKS, modules_to_save=["norm", "lm_head"]
    )
    return {name: path for name, (path, _) in found.items()}


@pytest.fixture(scope="module")
def llm(adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(lora_modules={name: str(path) for name, path in adapters.items()}, num_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Told]:
    """The outputs of requests run one at a time."""
    asked = zip(PROMPTS, NAMES * 2, strict=True)
    return [told(llm.generate(prompt, SAMPLED, lora_request=name)[0]) for prompt, name in asked]


def told(output: Any) -> Told:
    return [
        (
            list(choice.token_ids),
            [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)],
        )
        for choice in output.outputs
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 14, "max_model_len": 256},
        {"speculation": "suffix"},
        {"speculation": "draft-model", "draft_model": str(DEMO)},
        {"max_loras": 1},
        {"max_tokens_per_step": 16},
    ],
    ids=["few blocks", "looked up", "a draft model", "one place", "small steps"],
)
def test_company_changes_nothing(options: dict[str, Any], adapters: dict[str, Path], alone: list[Told]) -> None:
    async def ask(llm: AsyncLLM, prompt: str, name: str | None) -> Told:
        async for output in llm.generate(prompt, SAMPLED, lora_request=name):
            last = output
        return told(last)

    async def all_at_once() -> tuple[list[Told], int]:
        named = {name: str(path) for name, path in adapters.items()}
        async with AsyncLLM(lora_modules=named, **({"num_blocks": 64} | options)) as llm:
            asked = zip(PROMPTS, NAMES * 2, strict=True)
            answers = await asyncio.gather(*(ask(llm, prompt, name) for prompt, name in asked))
            return answers, llm._local.engine.stats().totals.get("preemptions", 0)

    answers, preemptions = asyncio.run(all_at_once())
    assert answers == alone
    assert preemptions or "max_model_len" not in options


def test_every_name_says_something_else(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = {tuple(llm.generate(PROMPTS[0], greedy, lora_request=name)[0].outputs[0].token_ids) for name in NAMES}
    assert len(answers) == 3
    hello = [{"role": "user", "content": "Hello"}]
    chat = [told(llm.chat(hello, SAMPLED, lora_request=name)[0]) for name in NAMES]
    assert chat[0] != chat[1] != chat[2] != chat[0]


def test_an_adapter_may_be_asked_for_by_its_path_where_paths_are_open(
    llm: LLM, adapters: dict[str, Path], tmp_path: Path
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    by_name = llm.generate(PROMPTS[0], greedy, lora_request="one")[0]
    by_path = llm.generate(PROMPTS[0], greedy, lora_request=LoRARequest("any", 1, str(adapters["one"])))[0]
    assert by_name.outputs[0].token_ids == by_path.outputs[0].token_ids
    elsewhere, _ = adapter_of(DEMO, tmp_path / "elsewhere")
    with pytest.raises(GenerationFailed, match="outside"):
        llm.generate(PROMPTS[0], greedy, lora_request=LoRARequest("any", 1, str(elsewhere)))
    for asked, why in (
        ("three", "not in lora_modules"),
        (LoRARequest("any", 1, str(tmp_path)), "adapter_config.json"),
    ):
        with pytest.raises(PagodaError, match=why):
            llm.generate(PROMPTS[0], greedy, lora_request=asked)


def test_an_adapter_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    adapter_of(DEMO, tmp_path, use_dora=True)
    with pytest.raises(ConfigError, match="use_dora"):
        LLM(lora_modules={"one": str(tmp_path)}, num_blocks=16)
