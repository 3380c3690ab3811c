"""`pagoda bench latency`: the time of a batch in one process, without a server: to the first token, and per token."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pagoda.bench.report import distribution_ms
from pagoda.bench.workload import BodyMaker, WorkloadRow, plain_ids
from pagoda.settings.flags import add_model_argument, add_options, given_flags
from pagoda.settings.numbers import number, seed, whole
from pagoda.settings.problems import ConfigError
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Delta, NextTokens

if TYPE_CHECKING:
    from pagoda.offline.local import Local

TIMES = {
    "first_token_ms": "first token of all rows",
    "per_token_ms": "each token after",
    "gap_ms": "gap between tokens",
    "total_ms": "whole batch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("workload")
    group.add_argument("--batch-size", type=whole(1), default=1, help="requests per batch [%(default)s]")
    group.add_argument("--input-len", type=whole(1), default=128, help="prompt tokens [%(default)s]")
    group.add_argument("--output-len", type=whole(1), default=64, help="output tokens [%(default)s]")
    group.add_argument("--iterations", type=whole(1), default=10, help="measured batches [%(default)s]")
    group.add_argument("--warmup", type=whole(), default=2, help="batches before the measurement [%(default)s]")
    group.add_argument("--temperature", type=number(), default=0.0, help="0 is greedy [%(default)s]")
    group.add_argument("--top-p", type=number(0, 1), default=1.0, help="[%(default)s]")
    group.add_argument("--seed", type=seed(), default=0, help="seed of the workload [%(default)s]")
    group.add_argument("--json", type=Path, help="write the report to this file")
    add_options(parser, "offline")


def main(arguments: argparse.Namespace) -> int:
    from pagoda.offline.local import Local

    options = given_flags(arguments, "offline")
    started = time.perf_counter()
    local = Local.load(options.pop("model", ""), options)
    try:
        report = {"load_s": time.perf_counter() - started} | measure(local, arguments)
    except PagodaError as error:
        raise ConfigError([error.message]) from error
    finally:
        local.engine.close()
    console = Console(highlight=False, soft_wrap=True)
    console.print(heading(report))
    console.print(table(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


@dataclass
class Stopwatch:
    """The sink of one batch: records when each row's tokens arrive, in seconds of `time.perf_counter`, and the first
    failure, because the engine keeps what a sink raises to itself."""

    open: set[str]
    arrivals: dict[str, list[float]] = field(default_factory=dict)
    failure: PagodaError | None = None

    def accepted(self, request_id: str, attempt: int, stream: int) -> None: ...

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        self._fail(error)

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        self._fail(PagodaError(ErrorCode.UNAVAILABLE, reason))

    def next_tokens(self, tokens: NextTokens) -> None:
        self.deltas(tokens.deltas())

    def deltas(self, deltas: list[Delta]) -> None:
        now = time.perf_counter()
        for delta in deltas:
            if delta.error_code is not None:
                self._fail(PagodaError(delta.error_code, delta.error_message))
            self.arrivals.setdefault(delta.request_id, []).extend([now] * len(delta.tokens.token_ids))
            if delta.ends_request:
                self.open.discard(delta.request_id)

    def _fail(self, error: PagodaError) -> None:
        self.failure = self.failure or error


@dataclass(frozen=True)
class BatchTimes:
    """Times of one batch, in seconds. `gaps` are those between consecutive tokens of a row, for all rows."""

    first: float
    total: float
    gaps: list[float]

    @classmethod
    def of(cls, started: float, arrivals: list[list[float]]) -> BatchTimes:
        """`arrivals`: for each row, the arrival times of its tokens; at least one each."""
        gaps = [later - before for times in arrivals for before, later in itertools.pairwise(times)]
        return cls(max(times[0] for times in arrivals) - started, max(times[-1] for times in arrivals) - started, gaps)


def run_batch(
    local: Local, prompts: list[list[int]], params: SamplingParams, adapters: Sequence[Adapter | None] = (None,)
) -> BatchTimes:
    """Generate for all prompts at once. They have the `adapters` in turn.

    Raises:
        PagodaError: a request does not fit the model, or failed.
    """
    turns = zip(prompts, itertools.cycle(adapters), strict=False)
    opened = [local.open(prompt, params, adapter=adapter) for prompt, adapter in turns]
    watch = Stopwatch({request.record.request_id for request in opened})
    started = time.perf_counter()
    for request in opened:
        local.engine.submit(request.record, watch)
    while watch.open and watch.failure is None:
        local.engine.step()
    if watch.failure is not None:
        raise watch.failure
    return BatchTimes.of(started, list(watch.arrivals.values()))


def measure(local: Local, arguments: argparse.Namespace) -> dict[str, Any]:
    """The report as plain data. Every batch has different prompts, so the prefix cache does not help."""
    params = SamplingParams(
        temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=arguments.output_len, ignore_eos=True
    )
    batches = []
    for index in range(-arguments.warmup, arguments.iterations):
        times = run_batch(local, make_prompts(arguments, index, local.limits.vocab_size), params)
        if index >= 0:
            batches.append(times)
    return summarise(batches, arguments.batch_size, arguments.input_len, arguments.output_len)


def make_prompts(arguments: argparse.Namespace, batch: int, vocab_size: int) -> list[list[int]]:
    """The prompts of one batch; the same for the same seed and number."""
    maker = BodyMaker(seed=arguments.seed, salt=str(batch), token_ids=plain_ids(vocab_size))
    row = WorkloadRow(prompt_tokens=arguments.input_len, output_tokens=arguments.output_len)
    return [maker.token_ids_of(index, row) for index in range(arguments.batch_size)]


def summarise(batches: list[BatchTimes], batch_size: int, input_len: int, output_len: int) -> dict[str, Any]:
    first_s = sum(times.first for times in batches)
    decode_s = sum(times.total - times.first for times in batches)
    tokens = batch_size * len(batches)
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "iterations": len(batches),
        "first_token_ms": distribution_ms([times.first for times in batches]),
        "per_token_ms": distribution_ms([sum(times.gaps) / len(times.gaps) for times in batches if times.gaps]),
        "gap_ms": distribution_ms([gap for times in batches for gap in times.gaps]),
        "total_ms": distribution_ms([times.total for times in batches]),
        "prompt_tokens_per_s": tokens * input_len / first_s,
        "output_tokens_per_s": tokens * (output_len - 1) / decode_s if output_len > 1 else None,
    }


def heading(report: dict[str, Any]) -> str:
    decode = report["output_tokens_per_s"]
    return (
        f"{report['iterations']} batches of {report['batch_size']}, {report['input_len']} tokens in and "
        f"{report['output_len']} out; loaded in {report['load_s']:.2f} s\n"
        f"prompts {report['prompt_tokens_per_s']:.1f} tokens/s"
        + ("" if decode is None else f", then output {decode:.1f} tokens/s")
    )


def table(report: dict[str, Any]) -> Table:
    points = ("mean", "p50", "p90", "p99", "max")
    found = Table("milliseconds")
    for point in points:
        found.add_column(point, justify="right")
    for name, text in TIMES.items():
        if report[name] is not None:
            found.add_row(text, *(f"{report[name][point]:.2f}" for point in points))
    return found
