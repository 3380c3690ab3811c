"""`pagoda bench throughput`: tokens per second of a model in one process, without a server."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagoda.bench.workload import BodyMaker, WorkloadShape, make_rows, plain_ids
from pagoda.settings.flags import add_model_argument, add_options, given_flags
from pagoda.settings.numbers import seed, whole
from pagoda_proto.params import SamplingParams

if TYPE_CHECKING:
    from pagoda.offline.llm import LLM

WARM_UP_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-requests", type=whole(1), default=32, help="requests, all submitted at once [%(default)s]"
    )
    group.add_argument("--input-len", type=whole(1), default=128, help="prompt tokens [%(default)s]")
    group.add_argument("--output-len", type=whole(1), default=64, help="output tokens [%(default)s]")
    group.add_argument("--prefix-len", type=whole(), default=0, help="shared tokens at the start of all prompts")
    group.add_argument("--seed", type=seed(), default=0, help="seed of the workload [%(default)s]")
    group.add_argument("--json", help="write the report to this file")
    add_options(parser, "offline")


def main(arguments: argparse.Namespace) -> int:
    from pagoda.offline.llm import LLM

    started = time.perf_counter()
    with LLM(**given_flags(arguments, "offline")) as llm:
        load_s = time.perf_counter() - started
        prompts = make_prompts(arguments, llm.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=arguments.output_len, ignore_eos=True)
        llm.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True))
        report = {"load_s": load_s} | measure(llm, prompts, params)
    for name, value in report.items():
        print(f"{name:24} {value:.2f}" if isinstance(value, float) else f"{name:24} {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def make_prompts(arguments: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Generate prompts of exact lengths; the same for the same seed."""
    shape = msgspec.convert(vars(arguments), WorkloadShape)
    maker = BodyMaker(seed=arguments.seed, token_ids=plain_ids(vocab_size))
    return [maker.token_ids_of(index, row) for index, row in enumerate(make_rows(shape, arguments.seed))]


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Generate once and report rates."""
    cpu, started = time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, params)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    input_tokens = sum(map(len, prompts))
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "requests": len(prompts),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests_per_s": len(prompts) / wall_s,
        "input_tokens_per_s": input_tokens / wall_s,
        "output_tokens_per_s": output_tokens / wall_s,
        "total_tokens_per_s": (input_tokens + output_tokens) / wall_s,
    }
