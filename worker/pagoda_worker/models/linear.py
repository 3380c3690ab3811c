"""The linear layers of a model: matrices that read the same input are one matrix, merged here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from pagoda_worker.checkpoints.source import Source, joined
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.kernels.segments import segmented


@dataclass(frozen=True)
class Linear:
    """One or several matrices as a back end packs them.

    Attributes:
        packed: What it computes with.
        columns: Which of the outputs are whose, by the names of the parts.
        activation: Of gate and up, of which comes act(gate) * up; "" leaves the outputs as they are.
    """

    packed: Any
    columns: Mapping[str, slice]
    activation: str = ""

    def linear(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] of gate and up; `ops` are of the back end that packed it."""
        if self.activation:
            return ops.gated_linear(x, self.packed, self.activation)
        return ops.linear(x, self.packed)


@dataclass(frozen=True)
class Mlp:
    gate_up: Linear
    down: Linear

    def run(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """x [T, H] -> [T, H]"""
        return self.down.linear(self.gate_up.linear(x, ops), ops)


@dataclass(frozen=True)
class Packer:
    """Makes the linear layers of a model from a checkpoint's. `dtype`: of matrices that are not quantised alike."""

    ops: Ops
    source: Source
    dtype: torch.dtype

    def pack(self, prefix: str, parts: Sequence[str], biased: bool, activation: str = "", segments: int = 1) -> Linear:
        """The matrices `prefix` + part, below one another, with their biases; see `Linear` and `kernels.segments`."""
        weights = [self.source.linear(prefix + part) for part in parts]
        bias = torch.cat([self.source.tensor(f"{prefix}{part}.bias") for part in parts]) if biased else None
        edges = pairwise(accumulate((weight.shape[0] for weight in weights), initial=0))
        columns = {part: slice(*edge) for part, edge in zip(parts, edges, strict=True)}
        weight = joined(weights, self.dtype)
        if activation:
            return Linear(self.ops.pack_gated(weight, bias), columns, activation)
        weight, segments = segmented(weight, segments)
        return Linear(self.ops.pack_linear(weight, bias, segments), columns)
