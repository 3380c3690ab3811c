#!/usr/bin/env python3
"""Time per token of a single client, against the time to read a step's bytes from memory.

    python bench/decode.py MODEL --formats bf16,int8,int4 [--rounds 3]

A step of one row reads every matrix once; in a mixture of experts, those of the experts that its router chooses, whose
number is fixed. These bytes divided by the machine's read bandwidth, measured before and after every batch, are the
floor. Keys and values count, too; data that fits into a cache may be faster, so a small model's share may exceed 100 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pagoda.bench.latency import make_prompts, run_batch
from pagoda.offline.local import Local
from pagoda.settings.numbers import whole
from pagoda_proto.params import SamplingParams
from pagoda_worker.checkpoints.formats import FIELD
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MoeShape, dense_mlp
from pagoda_worker.kernels.measure import PLAIN, Roofline, weight_bytes
from pagoda_worker.kernels.quantized import FORMATS
from pagoda_worker.kernels.roofline import SHAPES, Limits
from pagoda_worker.loading.model import spec_of

INPUT_TOKENS, OUTPUT_TOKENS = 32, 128
PROBE_BYTES = 512 * 1024 * 1024
Matrix = tuple[int, int]


class Read(NamedTuple):
    """Bytes that a step of one row reads."""

    dense: float
    experts: float
    logits: float
    cached: float

    @property
    def together(self) -> float:
        return sum(self)


def read_by(spec: DecoderSpec, quantization: str, context: int) -> Read:
    """`quantization` is that of the linear layers. Routers stay bf16; the output matrix is int8 unless that is bf16.
    Raises ValueError for latent attention, whose matrices are not known here."""
    form = FORMATS.get(quantization)
    dense = experts = cached = 0.0
    for layer in spec.layers:
        dense += sum(weight_bytes(n, k, form) for n, k in _dense(spec.hidden_size, layer))
        if isinstance(mlp := layer.mlp, MoeShape):
            dense += weight_bytes(mlp.routing.experts, spec.hidden_size, None)
            each = sum(weight_bytes(n, k, form) for n, k in _mlp(spec.hidden_size, mlp.width, gated=True))
            experts += mlp.routing.chosen * each
        cached += 2 * 2 * context * layer.attention.num_kv_heads * layer.attention.head_dim
    logits = weight_bytes(spec.vocab_size, spec.hidden_size, form and FORMATS["int8"])
    return Read(dense, experts, logits, cached)


def _dense(hidden: int, layer: LayerSpec) -> Iterator[Matrix]:
    """(N, K) of the matrices that every token passes."""
    if layer.latent is not None:
        raise ValueError("what attention over latents reads is not counted here")
    heads, size = layer.attention.num_heads, layer.attention.head_dim
    yield (heads + 2 * layer.attention.num_kv_heads) * size, hidden
    yield hidden, heads * size
    if (mlp := dense_mlp(layer)) is not None:
        yield from _mlp(hidden, mlp.width, gated=mlp.gated)


def _mlp(hidden: int, width: int, *, gated: bool) -> tuple[Matrix, Matrix]:
    return (width * (2 if gated else 1), hidden), (hidden, width)


def spec_at(model: Path) -> DecoderSpec:
    """Raises ValueError if it is not such a model, or its weights are already quantised."""
    try:
        fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"a directory in Hugging Face format is wanted: {error}") from error
    if FIELD in fields:
        raise ValueError(f"config.json: with {FIELD!r} its matrices have other sizes than are counted here")
    return spec_of(fields)


def measure(model: str, spec: DecoderSpec, quantization: str, rounds: int) -> dict[str, Any]:
    read = read_by(spec, quantization, INPUT_TOKENS + OUTPUT_TOKENS // 2)
    options = {"kv_cache_gib": 0.25, "max_model_len": 2 * (INPUT_TOKENS + OUTPUT_TOKENS)} | (
        {} if quantization == PLAIN else {"quantization": quantization}
    )
    local = Local.load(model, options)
    try:
        probe = Roofline(SHAPES["b135m"], Limits(cold_bytes=PROBE_BYTES, repeats=5)).ceiling_probe(PROBE_BYTES)
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        workload = argparse.Namespace(seed=0, batch_size=1, input_len=INPUT_TOKENS, output_len=OUTPUT_TOKENS)
        token_s, shares = [], []
        before = probe.measure().read
        for index in range(-1, rounds):
            times = run_batch(local, make_prompts(workload, index, local.limits.vocab_size), params)
            after = probe.measure().read
            if index >= 0:
                token_s.append(statistics.median(times.gaps))
                shares.append(read.together / ((before + after) / 2) / token_s[-1])
            before = after
    finally:
        local.engine.close()
    return {
        "quantization": quantization,
        "megabytes": {name: part / 1e6 for name, part in read._asdict().items()},
        "token_ms": [1000 * each for each in token_s],
        "read_bytes_per_s": after,
        "share": shares,
    }


def told(one: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {size:.0f}" for name, size in one["megabytes"].items())
    share, token_ms = one["share"], statistics.median(one["token_ms"])
    return (
        f"{one['quantization']:8} {token_ms:6.2f} ms a token ({1000 / token_ms:.1f} tokens/s); MB read: {parts}; "
        f"{one['read_bytes_per_s'] / 1e9:.1f} GB/s; share of the floor {statistics.median(share):.2f} "
        f"({min(share):.2f}-{max(share):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in Hugging Face format")
    parser.add_argument("--formats", default=PLAIN, help=f"of {PLAIN}, {', '.join(FORMATS)} [%(default)s]")
    parser.add_argument("--rounds", type=whole(1), default=3, help="batches that count [%(default)s]")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    formats = given.formats.split(",")
    if unknown := set(formats) - {PLAIN, *FORMATS}:
        parser.error(f"--formats: {', '.join(sorted(unknown))}")
    found = []
    try:
        spec = spec_at(Path(given.model))
        for quantization in formats:
            found.append(measure(given.model, spec, quantization, given.rounds))
            print(told(found[-1]), flush=True)
    except ValueError as error:
        parser.error(str(error))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
