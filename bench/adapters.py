#!/usr/bin/env python3
"""What adapters cost: decoding rows with several adapters mixed among them, against the same rows without.

    python bench/adapters.py MODEL [--rows 16] [--adapters 4] [--rank 16] [--quantization int8]

The adapters are files in PEFT's format with random numbers, for some or all matrices of every layer. Both sides run in
one process on the same loaded model, in short batches that take turns at going first; what counts is the ratio of the
median times between two tokens within a round, and of these ratios the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from pagoda.bench.latency import make_prompts, run_batch
from pagoda.offline.local import Local
from pagoda.settings.numbers import whole
from pagoda.settings.problems import ConfigError
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import SamplingParams

SPREAD = 0.02
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(model: Path, to: Path, rank: int, targets: Sequence[str], seed: int) -> None:
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, (outputs, inputs) in matrices(model, targets):
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        for part, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
            numbers = torch.empty(size).normal_(0, SPREAD, generator=generator)
            tensors[f"{stem}.lora_{part}.weight"] = numbers.bfloat16()
    to.mkdir(parents=True)
    save_file(tensors, to / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (to / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")


def matrices(model: Path, targets: Sequence[str]) -> list[tuple[str, tuple[int, int]]]:
    """Name and [outputs, inputs] of each but those of experts, which can have no adapter."""
    found, ends = [], tuple(f".{target}.weight" for target in targets)
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                if f".{name}".endswith(ends) and ".experts." not in name:
                    found.append((name, tuple(opened.get_slice(name).get_shape())))
    return found


def measure(local: Local, adapters: Sequence[Adapter | None], given: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds per step (without, with adapters) of every round that counts."""
    params = SamplingParams(temperature=0.0, max_tokens=given.output_len, ignore_eos=True)
    workload = argparse.Namespace(seed=0, batch_size=given.rows, input_len=given.input_len, output_len=given.output_len)
    sides = ((None,), adapters)
    pairs = []
    for index in range(-1, given.rounds):
        times = [0.0, 0.0]
        for side in (index % 2, 1 - index % 2):
            prompts = make_prompts(workload, 2 * index + side, local.limits.vocab_size)
            times[side] = statistics.median(run_batch(local, prompts, params, sides[side]).gaps)
        if index >= 0:
            pairs.append((times[0], times[1]))
    return pairs


def targets_of(given: argparse.Namespace) -> list[str]:
    """The matrices that were asked for, or else those of MATRICES that the model has. Raises ConfigError."""
    model, asked = Path(given.model), given.targets.split(",") if given.targets else MATRICES
    if not model.is_dir():
        raise ConfigError([f"{model} is no directory in Hugging Face format"])
    there = {name.removesuffix(".weight").rpartition(".")[2] for name, _ in matrices(model, asked)}
    missing = [target for target in asked if target not in there]
    if not there or (given.targets and missing):
        raise ConfigError([f"{model} has no {', '.join(missing)}"])
    return [target for target in asked if target in there]


def adapter_options(root: Path, given: argparse.Namespace) -> dict[str, str | int]:
    """Options with which the model has these adapters, whose files are made below `root`. Raises ConfigError."""
    if given.adapters > given.rows:
        raise ConfigError([f"{given.adapters} adapters need as many rows, not {given.rows}"])
    model, targets = Path(given.model), targets_of(given)
    places = {f"a{seed}": root / f"a{seed}" for seed in range(given.adapters)}
    for seed, place in enumerate(places.values()):
        make_adapter(model, place, given.rank, targets, seed)
    named = ",".join(f"{name}={place}" for name, place in places.items())
    return {"max_loras": given.adapters, "max_lora_rank": given.rank, "lora_modules": named}


def adapters_of(local: Local, count: int) -> list[Adapter | None]:
    return [local.adapter(f"a{seed}") for seed in range(count)]


def add_arguments(parser: argparse.ArgumentParser, count: int) -> None:
    parser.add_argument(
        "--adapters", type=whole(min(count, 1)), default=count, help="mixed among the rows [%(default)s]"
    )
    parser.add_argument("--rank", type=whole(1), default=16, help="of each adapter [%(default)s]")
    parser.add_argument("--targets", default="", help="matrices with an adapter [all of a layer]")


def run(given: argparse.Namespace) -> list[tuple[float, float]]:
    """Raises ConfigError or PagodaError: the model, with such options, cannot be used here."""
    options = {
        "kv_cache_gib": 0.5,
        "max_rows": given.rows,
        "max_model_len": given.input_len + given.output_len + 1,
    }
    chosen = {name: value for name in ("quantization", "instruction_set") if (value := getattr(given, name))}
    with tempfile.TemporaryDirectory() as root:
        local = Local.load(given.model, options | chosen | adapter_options(Path(root), given))
        try:
            return measure(local, adapters_of(local, given.adapters), given)
        finally:
            local.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in Hugging Face format")
    parser.add_argument("--rows", type=whole(1), default=16, help="requests at once [%(default)s]")
    add_arguments(parser, 4)
    parser.add_argument("--input-len", type=whole(1), default=32, help="prompt tokens of each [%(default)s]")
    parser.add_argument("--output-len", type=whole(2), default=32, help="output tokens of each [%(default)s]")
    parser.add_argument("--rounds", type=whole(1), default=15, help="[%(default)s]")
    parser.add_argument("--quantization", default="", help="of the weights [none]")
    parser.add_argument("--instruction-set", default="", metavar="LEVEL", help="[the best one]")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    if given.json is not None and not given.json.parent.is_dir():
        parser.error(f"--json: there is no directory {given.json.parent}")
    try:
        pairs, targets = run(given), ",".join(targets_of(given))
    except (ConfigError, PagodaError) as error:
        parser.error(str(error))
    ratios = sorted(without / adapted for without, adapted in pairs)
    without_ms, with_ms = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"{given.rows} rows: {without_ms:.2f} ms a step without adapters, {with_ms:.2f} ms with {given.adapters} of "
        f"rank {given.rank} on {targets}; without / with {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f}-{ratios[-1]:.3f} of {len(ratios)} rounds)"
    )
    if given.json is not None:
        given.json.write_text(json.dumps({"seconds": pairs, "ratios": ratios}), encoding="utf-8")


if __name__ == "__main__":
    main()
