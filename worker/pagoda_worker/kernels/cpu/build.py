"""Compiles the kernel library once, when Pagoda is installed. Standard library only: the build hook runs it by path.

The same source is compiled once per instruction set level with that level's flags; the level to run is chosen when the
library is loaded. Levels whose flags the compiler does not know are left out. Without a compiler there is no library,
and the torch back end serves.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "libpagoda.so"
OPTIMISE = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
WARN = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
FLAGS = [*OPTIMISE, *WARN]
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma"
AVX512_BF16 = AVX512 + " -mavx512bf16 -mavx512vnni"


class Level(NamedTuple):
    """One instruction set. `kind` becomes PAGODA_LEVEL; the compiler's own macros tell the code about VNNI and AMX."""

    name: str
    kind: int
    flags: str


LEVELS = (
    Level("base", 0, ""),
    Level("avx2", 1, AVX2),
    Level("avxvnni", 1, AVX2 + " -mavxvnni"),
    Level("avx512", 2, AVX512),
    Level("avx512vnni", 2, AVX512 + " -mavx512vnni"),
    Level("avx512bf16", 3, AVX512_BF16),
    Level("amx", 3, AVX512_BF16 + " -mamx-tile -mamx-bf16 -mamx-int8 -mprfchw"),
)


class CompileError(RuntimeError):
    """The compiler knows the flags of a level but fails on its code; its output is the message."""


def build(compiler: str | None = None, out: Path = LIBRARY, highest: str = LEVELS[-1][0]) -> Path | None:
    """Compile the levels up to `highest` into `out`; None if this machine has no C++ compiler.

    Raises:
        CompileError: there is a compiler, but it cannot compile the kernels.
    """
    compiler = compiler or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    x86 = platform.machine() in ("x86_64", "AMD64")
    names = [level.name for level in LEVELS]
    levels = LEVELS[: names.index(highest) + 1] if x86 else LEVELS[:1]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        highest_first = reversed(levels)  # they take longest
        compiled = list(pool.map(lambda level: _compile_level(compiler, Path(scratch), level), highest_first))
        objects = {index: path for index, path in enumerate(reversed(compiled)) if path is not None}
        mask = sum(1 << index for index in objects)
        interface = Path(scratch) / "pagoda.o"
        _run(
            [compiler, *FLAGS, "-fvisibility=default", f"-DPAGODA_LEVELS={mask}", "-c", str(SOURCE / "pagoda.cpp")],
            interface,
        )
        library = Path(scratch) / out.name
        _run([compiler, "-shared", "-pthread", str(interface), *map(str, objects.values())], library)
        _replace(library, out)
    return out


def is_current(out: Path = LIBRARY) -> bool:
    """Whether the library is newer than all of its sources."""
    sources = [Path(__file__), *SOURCE.rglob("*.*")]
    return out.exists() and out.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in sources)


def _compile_level(compiler: str, scratch: Path, level: Level) -> Path | None:
    """The object file of one level; None if the compiler cannot target such a processor at all."""
    empty, target = scratch / f"{level.name}.cpp", scratch / f"{level.name}.o"
    flags = [*FLAGS, *level.flags.split()]
    empty.touch()
    try:
        _run([compiler, *flags, "-c", str(empty)], target)
    except CompileError:
        if level.kind == 0:
            raise
        return None
    defines = [f"-DPAGODA_LEVEL={level.kind}", f"-DPAGODA_NS={level.name}"]
    _run([compiler, *flags, *defines, "-c", str(SOURCE / "level.cpp")], target)
    return target


def _run(command: list[str], target: Path) -> None:
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")


def _replace(built: Path, out: Path) -> None:
    """Replace the library atomically, so that a process that has the old one mapped keeps it intact."""
    staged = out.with_suffix(f".{os.getpid()}.tmp")
    shutil.copyfile(built, staged)
    staged.replace(out)


if __name__ == "__main__":  # before there is pip, see Makefile
    is_current() or build()
