#!/usr/bin/env python3
"""Two builds of the kernel library, compared step by step on a real model: is a change faster, and are bits the same?

    python bench/builds.py MODEL OLD.so NEW.so [--rows 8] [--quantization int4] [--instruction-set avx2]

Every step is computed by both builds; which of them goes first changes with every step of that size. Computing a step
again writes the same keys and values again. Only steps are compared: this tree's library quantises, packs and samples.
A machine's speed drifts within seconds, so only neighbours in time are compared: what counts is the median over steps
of time(OLD) / time(NEW). Exits 1 if any result of a step differs in any bit.

Both builds must have this tree's ABI and layout of weights. `python worker/pagoda_worker/kernels/cpu/build.py` builds a
tree's library.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.adapters import adapter_options, adapters_of, add_arguments

from pagoda.bench.latency import make_prompts, run_batch
from pagoda.offline.local import Local
from pagoda.settings.numbers import whole
from pagoda.settings.problems import ConfigError
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import SamplingParams
from pagoda_worker.cores import placement
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.program import Program
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.rows.batch import Batch


class Steps:
    """Takes the place of `Program.run`.

    Attributes:
        pairs: (seconds of the old build, of the new one) of every step, by its number of tokens.
        different: Steps with results that differ.
    """

    def __init__(self, builds: tuple[Path, Path], level: str) -> None:
        self.libraries = tuple(loaded(path, level) for path in builds)
        self.pairs: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        self.different = 0
        self._run = Program.run

    def run(self, program: Program, batch: Batch) -> tuple[torch.Tensor, ...]:
        pairs = self.pairs[batch.num_tokens]
        times = [0.0, 0.0]
        results: list[list[torch.Tensor]] = [[], []]
        first = len(pairs) % 2
        for side in (first, 1 - first):
            program._library = self.libraries[side]
            began = time.perf_counter()
            found = self._run(program, batch)
            times[side] = time.perf_counter() - began
            results[side] = [tensor.clone() for tensor in found]
        pairs.append((times[0], times[1]))
        self.different += any(not same(*both) for both in zip(*results, strict=True))
        return found


def loaded(path: Path, level: str) -> Library:
    """Raises BackendError: it is no build of the library, or one that cannot be used here."""
    try:
        return Library(placement(0), level, path)
    except (OSError, AttributeError) as error:
        raise BackendError(f"{path}: {error}") from error


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are the same, also those of NaN."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def told(num_tokens: int, pairs: list[tuple[float, float]]) -> str:
    old, new = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(one / other for one, other in pairs)
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return (
        f"steps of {num_tokens} tokens: {old:.2f} and {new:.2f} ms; "
        f"old / new {statistics.median(ratios):.3f} (quartiles {low:.3f}-{high:.3f} of {len(pairs)})"
    )


def measure(given: argparse.Namespace) -> Steps:
    """Raises BackendError, ConfigError or PagodaError: a build, or the model with such options, cannot be used here."""
    options = {
        "kernels": "native",
        "kv_cache_gib": given.kv_cache_gib,
        "max_model_len": given.input_len + given.output_len + 1,
    }
    if given.quantization:
        options["quantization"] = given.quantization
    if given.instruction_set:
        options["instruction_set"] = given.instruction_set
    with tempfile.TemporaryDirectory() as root:
        return compare(given, options | (adapter_options(Path(root), given) if given.adapters else {}))


def compare(given: argparse.Namespace, options: dict[str, Any]) -> Steps:
    steps = Steps((given.old, given.new), given.instruction_set)
    params = SamplingParams(temperature=0.0, max_tokens=given.output_len, ignore_eos=True)
    workload = argparse.Namespace(seed=0, batch_size=given.rows, input_len=given.input_len, output_len=given.output_len)
    with patch.object(Program, "run", lambda program, batch: steps.run(program, batch)):  # recordings keep this method
        local = Local.load(given.model, options)
        try:
            adapters = adapters_of(local, given.adapters) or (None,)
            for index in range(given.rounds):
                run_batch(local, make_prompts(workload, index, local.limits.vocab_size), params, adapters)
        finally:
            local.engine.close()
    return steps


def file_at(path: str) -> Path:
    """Absolute, because the loader searches elsewhere for a bare name."""
    found = Path(path).resolve()
    if not found.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in Hugging Face format, or a GGUF file")
    parser.add_argument("old", type=file_at, metavar="OLD.so")
    parser.add_argument("new", type=file_at, metavar="NEW.so")
    parser.add_argument("--rows", type=whole(1), default=1, help="requests at once [%(default)s]")
    parser.add_argument("--input-len", type=whole(1), default=32, help="prompt tokens of each [%(default)s]")
    parser.add_argument("--output-len", type=whole(2), default=100, help="output tokens of each [%(default)s]")
    parser.add_argument("--rounds", type=whole(1), default=3, help="batches of requests [%(default)s]")
    parser.add_argument("--quantization", default="", help="of the weights [none]")
    parser.add_argument("--instruction-set", default="", metavar="LEVEL", help="[the best one]")
    add_arguments(parser, 0)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5, help="[%(default)s]")
    given = parser.parse_args()
    try:
        steps = measure(given)
    except (BackendError, ConfigError, PagodaError) as error:
        parser.error(str(error))
    if not steps.pairs:
        parser.error("none of this model's steps is computed by the kernel library alone")
    for num_tokens, pairs in sorted(steps.pairs.items()):
        if len(pairs) >= given.rounds:  # others are too few to say anything
            print(told(num_tokens, pairs))
    print(f"steps with other bits: {steps.different}")
    return steps.different > 0


if __name__ == "__main__":
    sys.exit(main())
