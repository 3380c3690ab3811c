"""Environment variables for torch's libraries, which read them when they are first used.

The matrix libraries choose kernels by shape, and some of these sum in a different order for other shapes. Both can be
restricted to kernels that do not:

    oneDNN  ONEDNN_MAX_CPU_ISA  no AMX: its tiles split K by the number of rows
    MKL     MKL_CBWR            one code branch in its strict mode, which ignores the size and alignment of matrices;
                                offered for Intel's processors only; elsewhere its usual kernels, which may not hold

What is said to hold is tried before anything relies on it (`aten.rows_are_independent`).

A variable that an operator has set is kept, and is part of `numerics_id`.

Threads of torch's parallel loops spin while they wait, and a spinning thread occupies a core that others could use: the
gateway, another worker, the very thread that is waited for. They are set to spin for some tens of microseconds, then to
sleep; if they slept at once, every loop would wait for them to wake up. An operator's settings for this are kept, too.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
WAITING = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"}  # for GNU's threads, in rounds, and Intel's, in ms
_BRANCHES = {"avx512dq": "AVX512,STRICT", "avx2": "AVX2,STRICT"}  # by the CPU flag that the branch needs

_ISA_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


def steady_libraries(cpuinfo: str) -> dict[str, str]:
    """The variables for a processor as /proc/cpuinfo describes it."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {name.strip(): value.split() for name, _, value in reversed([*lines])}
    found = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    if fields.get("vendor_id") == ["GenuineIntel"]:
        branches = [branch for flag, branch in _BRANCHES.items() if flag in fields.get("flags", ())]
        found |= {"MKL_CBWR": branches[0]} if branches else {}
    return found


def choose_libraries() -> None:
    """Set the variables that are not set yet. Must be called before torch is imported or computes anything here: its
    threads ignore later changes."""
    waiting = {} if "OMP_WAIT_POLICY" in os.environ else WAITING
    for name, value in (steady_libraries(_cpuinfo()) | waiting).items():
        os.environ.setdefault(name, value)


def multiplies_bfloat16(cpuinfo: str, max_isa: str) -> bool:
    """Whether oneDNN has bfloat16 instructions instead of widening: the processor's, if it may use them."""
    flags = {word for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}) and max_isa not in _ISA_WITHOUT_BFLOAT16


def bfloat16_is_native() -> bool:
    """`multiplies_bfloat16` here."""
    return multiplies_bfloat16(_cpuinfo(), os.environ.get("ONEDNN_MAX_CPU_ISA", ""))


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def libraries_in_force() -> str:
    return " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
