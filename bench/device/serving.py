"""Whole jobs through an engine core in this process, and how soon a worker could begin with them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

from bench.device.job import Job, prompts, serve
from bench.device.models import load, records_steps, runner_of, shapes, spec_of, weight_bytes
from bench.device.report import Line, attempt
from bench.device.steps import free

from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.step.runner import ModelRunner

SERVED_BAR, START_BAR_S = 9500.0, 10.0
REQUESTS = {"0.6B": 256, "8B": 512}
LENGTHS = ((256, 128), (1024, 1024))
SMOKE_LENGTHS = ((24, 6), (40, 8))
# What a job of the 8B shape is thought to take when it is slow: with less time left it gets fewer requests.
SLOW_TOKENS_PER_S = 5000.0
UTILIZATION = 0.92
ANEW, BEFORE = "kernels compiled anew", "kernels compiled before"


def _count(job: Job, name: str, lengths: tuple[int, int], runner: ModelRunner) -> int:
    """Requests: no more than the cache holds at once, and than there is time for."""
    if job.smoke:
        return 3
    per_request = -(-sum(lengths) // job.block_size) + 1
    in_time = int(job.left_s * SLOW_TOKENS_PER_S / lengths[1])
    return max(1, min(REQUESTS[name], runner.facts.num_blocks // per_request, in_time))


def served(job: Job, name: str, runner: ModelRunner, lengths: tuple[int, int]) -> Iterator[Line]:
    """Output tokens per second of one job, after a short one of the same lengths."""
    count, vocab = _count(job, name, lengths, runner), runner.facts.vocab_size
    serve(runner, prompts(min(8, count), lengths[0], vocab, seed=1), 4)
    outputs, took = serve(runner, prompts(count, lengths[0], vocab), lengths[1])
    bar = job.bar(SERVED_BAR, holds=(name, lengths) == ("8B", (1024, 1024)))
    yield Line(
        what=_what(name, lengths),
        value=sum(map(len, outputs)) / took,
        unit="tokens/s",
        bar=bar,
        note=f"{count} requests, {took:.1f} s",
    )


def _what(name: str, lengths: tuple[int, int]) -> str:
    return f"served {name}, {lengths[0]} in, {lengths[1]} out"


def worker_options(job: Job, name: str) -> dict[str, Any]:
    if job.smoke:
        return {"kernels": job.kernels, "block_size": job.block_size, "max_rows": 4, "num_blocks": 64}
    return {
        "kernels": job.kernels,
        "block_size": job.block_size,
        "max_rows": REQUESTS[name],
        "max_model_len": 4096,
        "gpu_memory_utilization": UTILIZATION,
    }


def _throughput(job: Job, name: str) -> None:
    loaded, config, _ = load(job.hardware, shapes(job.smoke)[name], **worker_options(job, name))
    runner = runner_of(job.hardware, loaded, config)
    for lengths in SMOKE_LENGTHS if job.smoke else LENGTHS:
        attempt(_what(name, lengths), served, job, name, runner, lengths)


def throughput(job: Job) -> None:
    for name in REQUESTS:
        attempt(f"served {name}", _throughput, job, name)
        free(job)


def start(job: Job) -> None:
    """Triton compiles kernels for every shape anew, so what was compiled before is told apart."""
    with TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for name, how in (("0.6B", ANEW), ("0.6B", BEFORE), ("8B", BEFORE)):
            attempt(f"start-up {name}, {how}", _start, job, name, how)
            free(job)


def _start(job: Job, name: str, how: str) -> Iterator[Line]:
    fields = shapes(job.smoke)[name]
    options = {"kernels": job.kernels, "block_size": job.block_size} | ({"max_rows": 4} if job.smoke else {})
    if how == BEFORE and name != "0.6B":
        runner_of(job.hardware, *load(job.hardware, fields, **options)[:2])
        free(job)
    began = time.perf_counter()
    loaded, config, weights = load(job.hardware, fields, **options)
    job.hardware.synchronize()
    ready = time.perf_counter()
    runner = runner_of(job.hardware, loaded, config)
    job.hardware.synchronize()
    loading, preparing = ready - began - weights.seconds, time.perf_counter() - ready
    note = f"loading {loading:.1f} s without making weights up, {_prepared(loaded, config)} {preparing:.1f} s; "
    note += f"cache of {runner.facts.num_blocks * runner.facts.block_size:,} tokens; "
    note += f"reading {weight_bytes(spec_of(fields)) / 1e9:.1f} GB comes on top"
    what = f"start-up {name}, {how}"
    yield Line(what=what, value=loading + preparing, unit="s", bar=job.bar(START_BAR_S), note=note)


def _prepared(loaded: LoadedModel, config: WorkerConfig) -> str:
    recorded = records_steps(loaded, config)
    return "profile, decode graphs and first step" if recorded else "profile and first step, without decode graphs,"
