"""CPU back ends that run the same tests: torch, and the C++ library at every instruction set level."""

from __future__ import annotations

from functools import cache

import torch
from tests.worker.kernels.levels import levels

from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.library import Library
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.ops import Ops

BACKENDS = [("torch", torch.bfloat16), ("torch", torch.float32), *((level, torch.bfloat16) for level in levels())]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Allowed error from rounding to the type, relative to the largest value."""


@cache
def ops_of(name: str, dtype: torch.dtype, threads: int = 2) -> Ops:
    return AtenOps(torch.device("cpu"), dtype) if name == "torch" else NativeOps(Library([-1] * threads, name))
