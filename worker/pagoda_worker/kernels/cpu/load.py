"""Checks whether the native kernels can serve a model on this machine, and loads them."""

from __future__ import annotations

import torch

from pagoda_worker.cores import placement
from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.cpu.cache import MAX_QUANTIZED_DIM, QUANTIZED_DIMS
from pagoda_worker.kernels.cpu.native import LANES, NativeOps
from pagoda_worker.kernels.ops import BackendError, Needs

MAX_HEAD_DIM = 576  # see MAX_DIM in csrc/program.h


def load_native(device: torch.device, needs: Needs) -> NativeOps:
    """Raises BackendError, saying why, if these kernels cannot serve a model with these needs on this machine."""
    if device.type != "cpu":
        raise BackendError(f"kernels: native runs on cpu, not on {device.type}")
    if needs.dtype != torch.bfloat16:
        raise BackendError(f"kernels: native computes in bfloat16, not in {str(needs.dtype).removeprefix('torch.')}")
    if not needs.hidden_size:
        raise BackendError("kernels: native does not run models through transformers")
    _check_sizes(needs)
    return NativeOps(lib.Library(placement(needs.num_threads), needs.instruction_set))


def _check_sizes(needs: Needs) -> None:
    sizes = {"hidden size": (needs.hidden_size,), "head size": needs.head_dims, "latents of": needs.latents}
    if any(size % LANES for group in sizes.values() for size in group) or max((0, *needs.head_dims)) > MAX_HEAD_DIM:
        found = [f"{name} {', '.join(map(str, group))}" for name, group in sizes.items() if group]
        raise BackendError(
            f"kernels: native needs sizes that are multiples of {LANES} and heads of up to {MAX_HEAD_DIM}, "
            f"not {' and '.join(found)}"
        )


def unfit(needs: Needs) -> dict[str, str]:
    """What these kernels lack for this model, by family of operations."""
    lacking = {}
    if odd := [inputs for inputs in needs.inputs if inputs % lib.PAIR]:
        lacking["linear"] = f"native needs an even number of inputs, got {min(odd)}"
    if needs.quantized_cache and (largest := max(needs.head_dims)) > MAX_QUANTIZED_DIM:
        lacking["attention"] = f"{QUANTIZED_DIMS}, not {largest}"
    return lacking
