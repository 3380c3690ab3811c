"""Which machines give the same bits for the same request: those with the same `numerics_id`."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import torch

from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.cores import system_text
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import Ops
from pagoda_worker.library_choice import libraries_in_force

# Raised whenever a change of the arithmetic (order of sums, rounding, fusion) changes bits. A change of how the library
# is called raises `kernels.cpu.library.ABI` instead, which no other machine sees.
NUMERICS_VERSION = 11


def numerics_id(ops: Ops, kv_shape: KVShape, implementation: str, weights: str = "as stored") -> str:
    """A hash of everything that decides rounding, besides the weights.

    Args:
        ops: The back end.
        kv_shape: The dtype the model computes in, and how keys and values are kept: that of any group.
        implementation: Which code runs the model: "native" or "transformers <version>".
        weights: Their format once they are loaded: "as stored", "int4 group 64, activations int8"
    """
    kept = "keys and values" if kv_shape.planes == 2 else "keys that are values"
    parts = (
        f"abi {NUMERICS_VERSION}",
        f"torch {torch.__version__}",
        f"{ops.name} on {ops.device.type}",
        instruction_set(ops.device),
        f"{kv_shape.dtype} weights {weights}",
        f"{kept} in {kv_shape.stored_dtype}",
        ops.numerics,
        implementation,
    )
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def of_one_life(numerics_id: str) -> str:
    """A different one, which no other process will have."""
    return sha256(numerics_id.encode() + secrets.token_bytes(16)).hexdigest()[: len(numerics_id)]


def native_implementation(ropes: Iterable[RopeShape], max_len: int) -> str:
    """Our own code; rotary angles that depend on the longest row count as different numerics."""
    return " ".join(("native", *fixed_angles(ropes, max_len)))


def fixed_angles(ropes: Iterable[RopeShape], max_len: int) -> list[str]:
    """How rotary angles are stretched for all rows alike, because some row may become `max_len` long."""
    return sorted({found for rope in ropes if (found := rope.fixed_at(max_len))})


def instruction_set(device: torch.device) -> str:
    """What the matrix libraries choose their kernels by."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return f"{name} {capability}"
    flags = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_avx512_fp16_supported")
    found = [name for name in flags if getattr(torch.cpu, name, lambda: False)()]
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_vendor()} {' '.join(found)}"
    return f"{processor} {libraries_in_force()}"


def _vendor() -> str:
    """MKL picks its kernels by vendor too."""
    lines = system_text(Path("/proc/cpuinfo")).splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
