"""Compiles the kernel library, once, when Pagoda is installed. Standard library only: the build hook runs it by path.

The same source is compiled once per instruction set level with that level's flags; which one runs is decided when the
library is loaded. A level whose flags the compiler does not know is left out. Without a compiler there is no library,
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

SOURCE = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "libpagoda.so"
OPTIMISE = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
WARN = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
FLAGS = [*OPTIMISE, *WARN]
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma"
LEVELS = (
    ("base", ""),
    ("avx2", "-mavx2 -mfma -mf16c"),
    ("avx512", AVX512),
    ("avx512bf16", AVX512 + " -mavx512bf16 -mavx512vnni"),
)


class CompileError(RuntimeError):
    """The compiler knows the flags of a level and fails on its code; its output is the message."""


def build(compiler: str | None = None, out: Path = LIBRARY, highest: str = LEVELS[-1][0]) -> Path | None:
    """Compile the levels up to `highest` to `out`; None when this machine has no C++ compiler.

    Raises:
        CompileError: there is a compiler, but it cannot compile the kernels.
    """
    compiler = compiler or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    x86 = platform.machine() in ("x86_64", "AMD64")
    names = [name for name, _ in LEVELS]
    levels = list(enumerate(LEVELS[: names.index(highest) + 1] if x86 else LEVELS[:1]))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda entry: _compile_level(compiler, Path(scratch), entry[0], *entry[1]), levels)
        objects = {level: path for (level, _), path in zip(levels, compiled, strict=True) if path is not None}
        mask = sum(1 << level for level in objects)
        interface = Path(scratch) / "pagoda.o"
        _run(
            [compiler, *FLAGS, "-fvisibility=default", f"-DPAGODA_LEVELS={mask}", "-c", str(SOURCE / "pagoda.cpp")],
            interface,
        )
        library = Path(scratch) / out.name
        _run([compiler, "-shared", "-pthread", str(interface), *map(str, objects.values())], library)
        _replace(library, out)
    return out


def _compile_level(compiler: str, scratch: Path, level: int, name: str, flags: str) -> Path | None:
    """The object of one level; None where the compiler cannot make code for such a processor at all."""
    empty, target = scratch / f"{name}.cpp", scratch / f"{name}.o"
    empty.touch()
    try:
        _run([compiler, *FLAGS, *flags.split(), "-c", str(empty)], target)
    except CompileError:
        if level == 0:
            raise
        return None
    defines = [f"-DPAGODA_LEVEL={level}", f"-DPAGODA_NS={name}"]
    _run([compiler, *FLAGS, *flags.split(), *defines, "-c", str(SOURCE / "level.cpp")], target)
    return target


def _run(command: list[str], target: Path) -> None:
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")


def _replace(built: Path, out: Path) -> None:
    """In one step, so that a process which has the old library mapped keeps it whole."""
    staged = out.with_suffix(f".{os.getpid()}.tmp")
    shutil.copyfile(built, staged)
    staged.replace(out)
