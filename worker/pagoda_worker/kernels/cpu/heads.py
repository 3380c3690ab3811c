"""Per-head linear layers with the kernel library: one matrix for each head, packed one after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.operations import Heads, Tape


class NativeHeads(NamedTuple):
    """`panels` [Hq, ..]: those of each matrix [n, k], as in `NativeLinear`."""

    panels: Tensor
    heads: int
    n: int
    k: int


def packed(library: Library, weight: Tensor) -> NativeHeads:
    """weight [Hq, n, k] bfloat16"""
    return NativeHeads(torch.stack([library.pack(one.contiguous()) for one in weight]), *weight.shape)


def run(tape: Tape, x: Tensor, packed: NativeHeads) -> Tensor:
    """See `Ops.head_linear`."""
    y = tape.buffer(x.shape[0], packed.heads * packed.n, torch.bfloat16)
    operation = Heads(x=x, panels=packed.panels, y=y, heads=packed.heads, n=packed.n, k=packed.k)
    tape.take(operation, num_tokens=x.shape[0])
    return y
