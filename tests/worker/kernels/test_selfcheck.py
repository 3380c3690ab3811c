"""The self-check passes on working kernels, and names the fault of broken ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.worker.kernels.levels import levels

from pagoda_proto.steps import TopLogprobs
from pagoda_worker.kernel_choice import FAMILIES
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.cpu.cache import NativeKVCache
from pagoda_worker.kernels.cpu.library import Library, New, pages
from pagoda_worker.kernels.cpu.load import load_native
from pagoda_worker.kernels.cpu.native import NativeLinear, NativeOps
from pagoda_worker.kernels.cpu.selfcheck import problems
from pagoda_worker.kernels.ops import BackendError, Needs
from pagoda_worker.kernels.quantized import Format, QuantizedWeight, Weight

CPU = torch.device("cpu")
NEEDS = Needs(dtype=torch.bfloat16, hidden_size=64, head_dims=(16,))
pytestmark = pytest.mark.skipif(not levels(), reason="no C++ compiler here; the torch back end serves")


@pytest.mark.parametrize("level", levels())
def test_working_kernels_pass_at_every_level(level: str) -> None:
    assert not problems(NativeOps(Library([-1, -1], level)))


class Wrong(NativeOps):
    """Kernels with one fault."""

    fault = ""

    def linear(self, x: torch.Tensor, packed: NativeLinear) -> torch.Tensor:
        y = super().linear(x, packed)
        if self.fault == "linear":
            y[-1, -1] += 1
        elif self.fault == "neighbours" and x.shape[0] > 1:
            y[0, 0] = torch.nextafter(y[0, 0].float(), torch.tensor(100.0)).bfloat16() + 0.01
        return y

    def gated_linear(self, x: torch.Tensor, packed: NativeLinear, activation: str) -> torch.Tensor:
        return super().gated_linear(x, packed, activation) * (1.5 if self.fault == "gated" else 1)

    def quantize(self, weight: torch.Tensor, form: Format) -> QuantizedWeight:
        quantized = super().quantize(weight, form)
        if self.fault == "rounding" and form.bits == 4:
            quantized.levels[3, 5] ^= 1
        return quantized

    def pack_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, segments: int = 1, *, new: New = pages
    ) -> NativeLinear:
        packed = super().pack_linear(weight, bias, 1 if self.fault == "segments" else segments, new=new)
        if self.fault == "scales" and packed.form == (4, 16, 32, 1):
            packed.panels[0, 0] ^= 64
        if self.fault == "floats" and packed.form == (4, 16, 32, 2):
            packed.panels[0, 0] ^= 1  # the exponent of a scale
        return packed

    def activated_linear(self, x: torch.Tensor, packed: NativeLinear, activation: str) -> torch.Tensor:
        return super().activated_linear(x, packed, "gelu" if self.fault == "activation" else activation)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return super().layer_norm(x, weight, None if self.fault == "shift" else bias, eps)

    def moe(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        y = super().moe(x, *operands)
        if self.fault == "experts" or (self.fault == "crowd" and len(x) == 1):
            y[0, :3] += 1
        return y

    def head_linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return super().head_linear(x, packed) * (1.5 if self.fault == "heads" else 1)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, eps) * (2 if self.fault == "norm" else 1)

    def attend(self, query: torch.Tensor, *operands: Any) -> torch.Tensor:
        out = super().attend(query, *operands)
        if self.fault == "attention":
            out[-1] = 0
        elif self.fault == "cut" and query.shape[0] == 1:
            out[0, 0] += 0.01
        elif (self.fault == "int8" and operands[0].shape.quantized) or (
            self.fault == "latents" and operands[0].shape.planes == 1
        ):
            out[-1] = 0
        return out

    def sample(self, logits: torch.Tensor, rows: Any) -> Any:
        samples = super().sample(logits, rows)
        if self.fault == "token" or (self.fault == "company" and len(rows) == 1):
            samples[0] = samples[0]._replace(token_id=17)
        elif self.fault == "logprob":
            samples[2] = samples[2]._replace(logprobs=TopLogprobs(-1.0, samples[2].logprobs.rank, [], []))
        return samples

    def copy_blocks(self, kv: NativeKVCache, pairs: Sequence[tuple[int, int]]) -> None:
        for part in [[pair] for pair in pairs] if self.fault == "copies" else [pairs]:
            super().copy_blocks(kv, part)


@pytest.mark.parametrize(
    ("fault", "family", "words"),
    [
        ("linear", "linear", "linear layers are wrong"),
        ("neighbours", "linear", "depends on its neighbours"),
        ("segments", "linear", "segments of a linear layer are added wrongly"),
        ("gated", "linear", "gated layers are wrong"),
        ("scales", "linear", "linear layers are wrong (4 bits, activations 16, zeros)"),
        ("rounding", "linear", "weights are quantised wrongly (4 bits)"),
        ("activation", "linear", "layers with silu are wrong"),
        ("floats", "linear", "linear layers are wrong (floats of 4 bits)"),
        ("heads", "linear", "layers of heads are wrong"),
        ("experts", "linear", "experts are wrong"),
        ("crowd", "linear", "the experts' result for a row depends on its neighbours"),
        ("norm", "pointwise", "norms are wrong"),
        ("shift", "pointwise", "layer norms are wrong"),
        ("attention", "attention", "attention is wrong"),
        ("cut", "attention", "depends on how a prompt is cut"),
        ("int8", "attention", "attention over int8 is wrong"),
        ("latents", "attention", "attention over latents is wrong"),
        ("copies", "attention", "rounded or copied wrongly"),
        ("token", "sampling", "sampling is wrong"),
        ("logprob", "sampling", "sampling is wrong"),
        ("company", "sampling", "sampling a row depends on its neighbours"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, family: str, words: str) -> None:
    ops = Wrong(load_native(CPU, NEEDS).library)
    ops.fault = fault
    found = problems(ops)
    assert list(found) == [family]
    assert words in found[family]


def test_kernels_that_fail_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pagoda_worker.kernels.cpu.selfcheck.problems", lambda ops: dict.fromkeys(FAMILIES, "all is wrong")
    )
    with pytest.raises(BackendError, match="all is wrong"):
        load_ops(CPU, "native", NEEDS)
    ops, remarks = load_ops(CPU, "auto", NEEDS)
    assert ops.name == "torch"
    assert len(remarks) == len(FAMILIES)
    assert "all is wrong" in remarks[0]


def test_a_family_that_fails_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_worker.kernels.cpu.selfcheck.problems", lambda ops: {"attention": "it is wrong"})
    ops, remarks = load_ops(CPU, "auto", NEEDS)
    assert ops.name == "linear native, pointwise native, attention torch, sampling native"
    assert remarks == ["attention by torch, not by native: failed its self-check: it is wrong"]


@pytest.mark.parametrize("odd", [1, 97])
def test_layers_with_odd_inputs_are_left_to_torch(odd: int) -> None:
    needs = replace(NEEDS, inputs=(64, odd))
    ops, remarks = load_ops(CPU, "auto", needs)
    assert ops.name == "linear torch, pointwise native, attention native, sampling native"
    assert remarks == [f"linear by torch, not by native: native needs an even number of inputs, got {odd}"]
    with pytest.raises(BackendError, match=f"native cannot serve linear: .* got {odd}"):
        load_ops(CPU, "native", needs)
    assert load_ops(CPU, "native,linear=torch", needs)[0].name == ops.name
    x, weight = torch.randn(3, odd).bfloat16(), torch.randn(5, odd).bfloat16()
    got = ops.linear(x, ops.pack_linear(weight))
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=2e-2, atol=2e-2)
