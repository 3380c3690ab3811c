"""A model cut into shards, all computed in this process, gives the logits of the whole bit for bit.

Each shard is a separate decoder with its heads, its columns of gate and up, and its inputs of `out` and `down`; threads
exchange the partial sums of these and add them in the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any, NamedTuple, cast

import pytest
import torch
from tests.worker.checkpoints.formats.sources import WeightSource
from tests.worker.fakes_spec import spec_of
from tests.worker.kernels.levels import levels
from tests.worker.kernels.test_segments import columns
from tests.worker.models.harness import make_batch

from pagoda_worker.checkpoints.names import LLAMA
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, expected_tensors, linear_layers
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.quantized import FORMATS, Weight, by_rows, quantize
from pagoda_worker.kernels.segments import LEAST, MOST, tree_sum
from pagoda_worker.models.decoder import Decoder

CPU = torch.device("cpu")
INPUTS, HIDDEN, BLOCK = MOST * LEAST, 64, 16  # INPUTS: of `out` and of `down`
WIDTHS = (2, 4, 8)
SPEC = spec_of(
    vocab_size=128, hidden_size=HIDDEN, norm_eps=1e-6, max_positions=64, windows=(None, None), rope_of_layer=(0, 0),
    ropes=(RopeShape(theta=10_000.0, head_dim=64),), num_heads=INPUTS // 64, num_kv_heads=8, head_dim=64,
    attention_scale=0.125, intermediate_size=INPUTS, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
SUMMED = (LLAMA.out, LLAMA.down)
STEPS = (
    [(list(range(3, 40)), 0, [0, 1, 2]), ([7, 9], 0, [3])],
    [([5], 37, [0, 1, 2]), ([8], 2, [3])],
)


class Exchange:
    """All-reduce: gives every shard the total of all shards' sums."""

    def __init__(self, width: int) -> None:
        self._sums = [torch.empty(0)] * width
        self._barrier = Barrier(width, timeout=60)

    def total(self, rank: int, sums: torch.Tensor) -> torch.Tensor:
        self._sums[rank] = sums
        self._barrier.wait()
        total = tree_sum(torch.stack(self._sums))
        self._barrier.wait()  # the next sums must wait until all have read these
        return total


class Cut(NamedTuple):
    """A layer whose inputs are divided among the shards; the bias is kept out of the parts."""

    packed: Any
    bias: torch.Tensor


class ShardOps:
    """The operations of one shard."""

    def __init__(self, ops: Ops, rank: int, exchange: Exchange) -> None:
        self._ops, self._rank, self._exchange = ops, rank, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: torch.Tensor, packed: Any, added: None = None) -> torch.Tensor:
        if not isinstance(packed, Cut):
            return self._ops.linear(x, packed)
        total = self._exchange.total(self._rank, self._ops.logits(x, packed.packed))
        return (total + packed.bias).to(x.dtype)


def source_of(quantization: str, dtype: torch.dtype) -> WeightSource:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.5)).to(dtype)
        for name, shape in expected_tensors(SPEC).items()
    }
    weights: dict[str, Weight] = {name: tensors[f"{name}.weight"] for name in linear_layers(SPEC)}
    if quantization:
        weights = {name: quantize(weight, FORMATS[quantization]) for name, weight in weights.items()}
    return WeightSource(tensors, weights)


def shard_of(source: WeightSource, rank: int, width: int) -> WeightSource:
    def part(name: str, weight: Weight) -> Weight:
        if name.endswith(SUMMED):
            return columns(weight, rank, width)
        return weight if name == LLAMA.head else by_rows(weight, lambda rows: rows.chunk(width)[rank])

    def bias(name: str, value: torch.Tensor) -> torch.Tensor:
        if not name.endswith(".bias"):
            return value
        return value * 0 if name.removesuffix(".bias").endswith(SUMMED) else value.chunk(width)[rank]

    return WeightSource(
        {name: bias(name, value) for name, value in source.tensors.items()},
        {name: part(name, weight) for name, weight in source.weights.items()},
    )


def spec_of_shard(width: int) -> DecoderSpec:
    def cut(layer: LayerSpec) -> LayerSpec:
        heads, kv_heads = layer.attention.num_heads // width, layer.attention.num_kv_heads // width
        attention = replace(layer.attention, num_heads=heads, num_kv_heads=kv_heads)
        return replace(layer, attention=attention, mlp=replace(layer.mlp, width=layer.mlp.width // width))

    return replace(SPEC, layers=tuple(map(cut, SPEC.layers)))


def decoder_of_shard(source: WeightSource, ops: Ops, dtype: torch.dtype, rank: int, width: int) -> Decoder:
    decoder = Decoder(spec_of_shard(width), ops, shard_of(source, rank, width), dtype, 64)
    for index, layer in enumerate(decoder._layers):
        out, down = (
            replace(one, packed=Cut(one.packed, source.tensors[f"{LLAMA.in_layer(index, part)}.bias"]))
            for one, part in ((layer.out, LLAMA.out), (layer.mlp.down, LLAMA.down))
        )
        decoder._layers[index] = replace(layer, out=out, mlp=replace(layer.mlp, down=down))
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    """Logits of every token of STEPS."""
    with torch.inference_mode():
        kv = [decoder.ops.new_kv_cache(group, 4, BLOCK) for group in decoder.kv_groups]
        steps = [decoder.forward(make_batch(rows, BLOCK), kv) for rows in STEPS]
        return torch.cat([decoder.logits(hidden) for hidden in steps])


def assert_shards_give_the_whole(new_ops: Callable[[], Ops], quantization: str, dtype: torch.dtype) -> None:
    source = source_of(quantization, dtype)
    whole = logits_of(Decoder(SPEC, new_ops(), source, dtype, 64))
    assert whole.isfinite().all()
    for width in WIDTHS:
        exchange = Exchange(width)
        shards = [
            decoder_of_shard(source, cast("Ops", ShardOps(new_ops(), rank, exchange)), dtype, rank, width)
            for rank in range(width)
        ]
        with ThreadPoolExecutor(width) as threads:
            for logits in threads.map(logits_of, shards):
                assert torch.equal(logits, whole), width


def test_the_model_has_segments_enough() -> None:
    assert SPEC.segments == MOST
    for width in WIDTHS:
        assert spec_of_shard(width).segments == MOST // width


@pytest.mark.parametrize("quantization", ["", *FORMATS])
@pytest.mark.parametrize("level", levels())
def test_native(level: str, quantization: str) -> None:
    assert_shards_give_the_whole(lambda: NativeOps(Library([-1], level)), quantization, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch(dtype: torch.dtype) -> None:
    assert_shards_give_the_whole(lambda: AtenOps(CPU, dtype), "", dtype)
