"""The self-check passes on kernels that work, and names what is wrong with ones that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.worker.kernels.test_cpu_library import levels

from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.cpu.cache import NativeKVCache
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.native import NativeLinear, NativeOps, load_native
from pagoda_worker.kernels.cpu.selfcheck import problem
from pagoda_worker.kernels.ops import BackendError, Needs

NEEDS = Needs(dtype=torch.bfloat16, hidden_size=64, head_dim=16)
pytestmark = pytest.mark.skipif(not levels(), reason="no C++ compiler here; the torch back end serves")


@pytest.mark.parametrize("level", levels())
def test_working_kernels_pass_at_every_level(level: str) -> None:
    assert problem(NativeOps(Library([-1, -1], level))) is None


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

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, eps) * (2 if self.fault == "norm" else 1)

    def attend(self, query: torch.Tensor, *operands: Any) -> torch.Tensor:
        out = super().attend(query, *operands)
        if self.fault == "attention":
            out[-1] = 0
        elif self.fault == "cut" and query.shape[0] == 1:
            out[0, 0] += 0.01
        elif self.fault == "int8" and operands[0].shape.quantized:
            out[-1] = 0
        return out

    def copy_blocks(self, kv: NativeKVCache, pairs: Sequence[tuple[int, int]]) -> None:
        for part in [[pair] for pair in pairs] if self.fault == "copies" else [pairs]:
            super().copy_blocks(kv, part)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("linear", "linear layers are wrong"),
        ("neighbours", "depends on its neighbours"),
        ("norm", "norms are wrong"),
        ("attention", "attention is wrong"),
        ("cut", "depends on how a prompt is cut"),
        ("int8", "attention over int8 is wrong"),
        ("copies", "rounded or copied wrongly"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, words: str) -> None:
    ops = Wrong(load_native(torch.device("cpu"), NEEDS).library)
    ops.fault = fault
    assert words in (problem(ops) or "")


def test_kernels_that_fail_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_worker.kernels.cpu.selfcheck.problem", lambda ops: "all is wrong")
    with pytest.raises(BackendError, match="all is wrong"):
        load_ops(torch.device("cpu"), "native", NEEDS)
    ops, reason = load_ops(torch.device("cpu"), "auto", NEEDS)
    assert ops.name == "torch"
    assert "all is wrong" in reason
