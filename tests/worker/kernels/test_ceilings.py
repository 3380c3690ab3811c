"""The probes of the machine's ceilings do what they claim, and stay in registers."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from pagoda_worker.kernels.cpu import build as building
from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.cpu.ceilings import CeilingProbe
from pagoda_worker.kernels.roofline import Ceilings


@pytest.mark.parametrize("words", [64, 3 * 2**17, 2**17 + 64])
def test_reading_reads_every_word(library: lib.Library, words: int) -> None:
    buffer = torch.randint(-(2**62), 2**62, (words,), generator=torch.Generator().manual_seed(words))
    expected = 0
    for value in buffer.tolist():
        expected ^= value % 2**64
    assert library.read(buffer) == expected


@pytest.mark.parametrize("kind", lib.PEAKS)
def test_operations_are_counted_for_all_threads(library: lib.Library, kind: str) -> None:
    once, thrice = library.multiply(kind, 100), library.multiply(kind, 300)
    assert thrice == 3 * once
    assert once / 100 / library.num_threads / 2 >= 12 * 4, "at least 12 chains of at least 4 values"


def test_ceilings_are_measured_again_and_again(library: lib.Library) -> None:
    probe = CeilingProbe(library, buffer_bytes=2**20, repeats=1)
    for ceilings in (probe.measure(), probe.measure()):
        assert min(vars(ceilings).values()) > 0


def test_what_was_measured_between_two_is_held_against_their_mean() -> None:
    assert Ceilings(1.0, 10.0, 30.0).mean(Ceilings(3.0, 20.0, 10.0)) == Ceilings(2.0, 15.0, 20.0)


def loop_of(assembly: str, instruction: str) -> list[str]:
    """The lines of the innermost loop that contains the instruction."""
    lines = [line.strip() for line in assembly.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith(instruction))
    start = max(i for i in range(at) if re.match(r"\.L\d+:", lines[i]))
    label = lines[start].rstrip(":")
    end = next(i for i in range(at, len(lines)) if re.search(rf"\bj\w+\s+{re.escape(label)}$", lines[i]))
    return lines[start : end + 1]


INSTRUCTIONS = (
    ("base", "mulps"), ("avx2", "vfmadd"), ("avx2", "vpmaddubsw"), ("avxvnni", "{vex} vpdpbusd"),
    ("avx512", "vfmadd"), ("avx512", "vpmaddubsw"), ("avx512vnni", "vpdpbusd"), ("avx512bf16", "vdpbf16ps"),
    ("avx512bf16", "vpdpbusd"),
)  # fmt: skip


@pytest.mark.parametrize(("level", "instruction"), INSTRUCTIONS if platform.machine() in ("x86_64", "AMD64") else ())
def test_accumulators_stay_in_registers(level: str, instruction: str, tmp_path: Path) -> None:
    """A probe that stores its accumulators measures the store port, which is half as fast."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source = tmp_path / "probe.cpp"
    source.write_text(
        '#include "ceilings.h"\n'
        "double bf16(long rounds) { return probe::peak_bf16(rounds); }\n"
        "double int8(long rounds) { return probe::peak_int8(rounds); }\n"
        "uint64_t all(const char* data, size_t bytes) { return probe::read_all(data, bytes); }\n"
    )
    _, kind, level_flags = next(one for one in building.LEVELS if one.name == level)
    flags = [*building.OPTIMISE, *level_flags.split(), "-w", f"-I{building.SOURCE}"]
    defines = [f"-DPAGODA_LEVEL={kind}", "-DPAGODA_NS=probe"]
    subprocess.run([compiler, *flags, *defines, "-S", str(source), "-o", str(tmp_path / "probe.s")], check=True)
    loop = loop_of((tmp_path / "probe.s").read_text(), instruction)
    used = [line for line in loop if line.startswith(instruction)]
    assert len(used) >= 12
    assert not [line for line in loop if "(%r" in line or "%rsp" in line]
