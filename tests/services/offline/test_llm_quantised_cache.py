"""The offline path with an int8 KV cache: tokens depend on neither batch, chunks, blocks nor prefix hits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gateway.model_dir import byte_level_tokenizer
from tests.worker.models.checkpoints import NATIVE, make_model, prompts, save

from pagoda import LLM, SamplingParams
from pagoda_worker.kernels.cpu.build import LIBRARY

KERNELS = ["torch", *(["native"] if LIBRARY.exists() else [])]
# Two choices per request share their prompt's blocks and diverge by copying one.
PARAMS = SamplingParams(n=2, temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return save(make_model(*NATIVE["qwen3"]), path, torch.bfloat16)


def tokens(llm: LLM, given: list[list[int]]) -> list[list[list[int]]]:
    outputs = llm.generate(given, PARAMS, use_tqdm=False)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_depend_on_the_request_alone(path: Path, kernels: str) -> None:
    options = {"kernels": kernels, "kv_cache_dtype": "int8", "num_blocks": 192, "threads": 1, "prefix_cache": True}
    with LLM(str(path), chunk_size=2048, block_size=16, **options) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in prompts()]
        assert tokens(llm, prompts()) == alone  # together, with their prefixes cached
        assert all(first != second for first, second in alone)
    with LLM(str(path), chunk_size=16, block_size=32, **options) as llm:
        assert tokens(llm, prompts()[::-1]) == alone[::-1]
    with LLM(str(path), **options | {"kv_cache_dtype": "auto"}) as llm:
        assert tokens(llm, prompts()) != alone  # the option reaches the kernels
