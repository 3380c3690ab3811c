"""The same job by the continuous batching of transformers, as it is installed, and by Pagoda right before it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

import torch
from bench.device.job import Job, prompts, serve
from bench.device.models import load, runner_of, shapes
from bench.device.report import Line, attempt
from bench.device.serving import worker_options
from bench.device.steps import free

NAME, REQUESTS, LENGTHS = "0.6B", 256, (256, 128)
SMOKE_REQUESTS, SMOKE_LENGTHS = 3, (24, 6)


def run(job: Job) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    count, (length, output_len) = (SMOKE_REQUESTS, SMOKE_LENGTHS) if job.smoke else (REQUESTS, LENGTHS)
    given = prompts(count, length, shapes(job.smoke)[NAME]["vocab_size"])
    attempt(f"transformers {NAME}", _compare, job, given, output_len)


def _compare(job: Job, given: list[list[int]], output_len: int) -> Iterator[Line]:
    what = f"{NAME}, {len(given[0])} in, {output_len} out"
    mine = _pagoda(job, given, output_len)
    yield Line(what=f"Pagoda {what}", value=mine, unit="tokens/s", note=f"{len(given)} requests")
    free(job)
    theirs, attention = _transformers(job, given, output_len)
    version = importlib.metadata.version("transformers")
    yield Line(what=f"transformers {what}", value=theirs, unit="tokens/s", note=f"{version}, attention {attention}")
    yield Line(what="Pagoda / transformers", value=mine / theirs, unit="times")


def _pagoda(job: Job, given: list[list[int]], output_len: int) -> float:
    loaded, config, _ = load(job.hardware, shapes(job.smoke)[NAME], **worker_options(job, NAME))
    runner = runner_of(job.hardware, loaded, config)
    serve(runner, given[:8], 4)
    return len(given) * output_len / serve(runner, given, output_len)[1]


def _transformers(job: Job, given: list[list[int]], output_len: int) -> tuple[float, str]:
    """Output tokens per second, from the first request's arrival to the last one's end, and which attention."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    fields = shapes(job.smoke)[NAME]
    config = AutoConfig.for_model(**{name: value for name, value in fields.items() if name != "architectures"})
    with job.hardware.device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    greedy = GenerationConfig(do_sample=False, max_new_tokens=output_len, eos_token_id=-1, pad_token_id=0)
    limits = {"num_blocks": 16, "max_batch_tokens": 64} if job.smoke else {}
    _generate(model, given[:8], greedy, limits)
    results = _generate(model, given, greedy, limits)
    made = [len(result.generated_tokens) for result in results]
    if made != [output_len] * len(given):
        raise RuntimeError(f"{len(made)} of {len(given)} requests ended, with {sum(made)} tokens")
    began = min(result.created_time for result in results)
    return sum(made) / (max(result.lifespan[1] for result in results) - began), model.config._attn_implementation


def _generate(model: Any, given: list[list[int]], greedy: Any, limits: dict[str, int]) -> list[Any]:
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(**limits)
    return list(model.generate_batch(given, generation_config=greedy, continuous_batching_config=config).values())
