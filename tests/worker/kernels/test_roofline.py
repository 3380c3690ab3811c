"""The least that an operation costs, and that every operation of the native kernels is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.worker.kernels.levels import levels

from pagoda_worker.kernels import measure
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.measure import Roofline, weight_bytes
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.kernels.quantized import FORMATS, QuantizedWeight
from pagoda_worker.kernels.roofline import SHAPES, Ceilings, Limits, ModelShape, Point, parse_shape

SMALL = ModelShape(name="small", hidden=64, middle=96, heads=4, kv_heads=2, head_dim=32, vocab=128, head_norm=True)
QUICK = Limits(cold_bytes=1, repeats=1, max_tokens=1024)

pytestmark = pytest.mark.skipif(not levels(), reason="no C++ compiler on this machine; there is nothing to measure")


def point(**changes: Any) -> Point:
    fields: dict[str, Any] = {
        "op": "o",
        "shape": "s",
        "seconds": 1.0,
        "num_bytes": 4.0,
        "operations": 0.0,
        "unit": "bf16",
    }
    return Point(**fields | changes)


def test_the_floor_is_set_by_what_takes_longer() -> None:
    ceilings = Ceilings(read=8.0, bf16=100.0, int8=200.0)
    assert point().floor_s(ceilings) == 0.5
    assert point(operations=80.0).floor_s(ceilings) == 0.8
    assert point(operations=80.0, unit="int8").floor_s(ceilings) == 0.5
    assert point(operations=80.0, seconds=1.6).share(ceilings) == 0.5


def test_shapes_by_name_and_by_sizes() -> None:
    assert parse_shape("b600m") is SHAPES["b600m"]
    assert parse_shape("hidden=64,middle=96,heads=4,kv_heads=2,head_dim=32,vocab=128").matrices == {
        "qkv": (256, 64), "out": (64, 128), "gate_up": (192, 64), "down": (64, 96), "logits": (128, 64),
    }  # fmt: skip
    assert parse_shape("hidden=64,middle=96,heads=4,kv_heads=2,head_dim=32,vocab=128,head_norm=1").head_norm


def test_layers_of_shards_are_measured_with_their_segments() -> None:
    assert SHAPES["8b"].segments == {"qkv": 1, "out": 8, "gate_up": 1, "down": 8, "logits": 1}
    assert set(SHAPES["b135m"].segments.values()) == {1}


@pytest.mark.parametrize("text", ["b7", "hidden=64", "hidden=x,middle=1,heads=1,kv_heads=1,head_dim=1,vocab=1", ""])
def test_another_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape must be one of b135m.*got"):
        parse_shape(text)


def test_the_bytes_of_a_matrix_include_its_scales() -> None:
    assert weight_bytes(10, 128, None) == 2560
    assert weight_bytes(10, 128, FORMATS["int8"]) == 10 * 128 + 40
    assert weight_bytes(10, 128, FORMATS["int4"]) == 10 * 64 + 2 * 20


def test_every_operation_is_measured() -> None:
    found = list(Roofline(SMALL, QUICK, threads=2).points(["bf16"]))
    assert {one.op for one in found} == {
        "rotate, bf16 cache", "prefill, bf16 cache", "rotate, int8 cache", "prefill, int8 cache",
        "rms norm", "add, rms norm", "embed",
        "sample, greedy", "sample, top_p 0.9", "sample, top_k 50", "linear bf16",
    }, "decoding takes more tokens of context than the limit"  # fmt: skip
    assert all(one.seconds > 0 and one.num_bytes > 0 for one in found)
    matrices = [one.shape.split()[0] for one in found if one.op == "linear bf16"]
    assert matrices == ["qkv"] * 5 + ["out"] * 5 + ["gate_up"] * 5 + ["down"] * 5 + ["logits"] * 4


def test_what_is_asked_for_is_measured_alone() -> None:
    limits = Limits(cold_bytes=1, repeats=1, max_tokens=4096, only=("decode, bf16",))
    (found,) = Roofline(SMALL, limits, threads=1).points()
    assert (found.op, found.shape) == ("decode, bf16 cache", "1 rows x 4096")
    assert found.operations == 4 * 4096 * 4 * 32
    assert found.num_bytes == 4096 * 2 * 2 * 2 * 32 + 4 * 4 * 32


def test_copies_exceed_the_caches_but_do_not_take_forever() -> None:
    roofline = Roofline(SMALL, Limits(cold_bytes=1000, repeats=1), threads=1)
    assert roofline._num_copies(300.0) == 4
    assert roofline._num_copies(300.0, operations=measure.OPERATIONS_PER_RUN) == 1
    assert roofline._num_copies(0.001) == measure.MOST_COPIES


def test_a_copy_is_one_of_many_and_their_results_are_right() -> None:
    roofline = Roofline(SMALL, QUICK, threads=2)
    weights = [torch.randn(32, 64).bfloat16() for _ in range(3)]
    packed = [roofline.ops.pack_linear(weight) for weight in weights]
    x, results = torch.randn(5, 64).bfloat16(), {}

    def record(ops: Any, copy: int) -> torch.Tensor:
        results[copy] = ops.linear(x, packed[copy])
        return results[copy]

    roofline._time(3, record)
    for copy, weight in enumerate(weights):
        assert torch.equal(results[copy], roofline.ops.linear(x, roofline.ops.pack_linear(weight)))


def test_a_cache_is_written_in_every_cell() -> None:
    roofline = Roofline(SMALL, QUICK, threads=1)
    kv = roofline._full_cache(KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16), 130)
    for layer in kv.tensors:
        assert (layer != 0).float().mean() > 0.99


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_layers_are_packed_from_their_levels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roofline = Roofline(SMALL, Limits(cold_bytes=1, repeats=1, max_tokens=1), threads=1)
    shapes = SMALL.matrices | {"down": (64, 128)}
    monkeypatch.setattr(ModelShape, "matrices", shapes)
    given = []
    pack = roofline.ops.pack_linear

    def pack_linear(weight: Any, bias: None, segments: int) -> Any:
        given.append(weight)
        return pack(torch.zeros(weight.levels.shape, dtype=torch.bfloat16))

    monkeypatch.setattr(roofline.ops, "pack_linear", pack_linear)
    found = list(roofline._linears(name))
    assert len(found) == len(given) == len(shapes)
    assert all(isinstance(weight, QuantizedWeight) and weight.bits == FORMATS[name].bits for weight in given)
    assert {one.unit for one in found} == {"bf16" if name == "int4a16" else "int8"}


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BackendError, match="not 'sse'"):
        Roofline(SMALL, QUICK, instruction_set="sse")
