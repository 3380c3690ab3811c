from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagoda_worker.library_choice import VARIABLES, WAITING, multiplies_bfloat16, steady_libraries

CASES = [
    ("GenuineIntel", "fpu avx2 avx512dq amx_tile", "AVX512,STRICT"),
    ("GenuineIntel", "fpu avx2 fma", "AVX2,STRICT"),
    ("GenuineIntel", "fpu sse4_2", None),
    ("AuthenticAMD", "fpu avx2 avx512dq", None),
]


@pytest.mark.parametrize(("vendor", "flags", "branch"), CASES)
def test_each_processor_has_its_branch(vendor: str, flags: str, branch: str | None) -> None:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\n"
    found = steady_libraries(one + one.replace("fpu", "later"))
    assert found["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert found.get("MKL_CBWR") == branch


def test_a_machine_that_says_nothing_gets_no_branch() -> None:
    assert steady_libraries("") == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@pytest.mark.parametrize("given", ["", "AVX2"])
def test_what_was_said_stays_and_is_told(given: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    program = (
        "from pagoda_worker.library_choice import choose_libraries, libraries_in_force\n"
        "choose_libraries(); print(libraries_in_force())"
    )
    environment |= {"ONEDNN_MAX_CPU_ISA": given} if given else {}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert f"ONEDNN_MAX_CPU_ISA={given or 'AVX512_CORE_BF16'}" in done.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, WAITING),
        ({"GOMP_SPINCOUNT": "7"}, WAITING | {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "passive"}, dict.fromkeys(WAITING, "-")),
    ],
)
def test_threads_wait_as_an_operator_says(given: dict[str, str], expected: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {*WAITING, "OMP_WAIT_POLICY"}}
    program = (
        "import os, sys; from pagoda_worker.library_choice import choose_libraries\n"
        "assert 'torch' not in sys.modules; choose_libraries()\n"
        f"print(*(os.environ.get(name, '-') for name in {list(WAITING)!r}))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(expected.values())


@pytest.mark.parametrize(
    ("flags", "max_isa", "native"),
    [
        ("flags : fpu avx512_bf16 avx2", "AVX512_CORE_BF16", True),
        ("flags : fpu avx512_bf16 avx2", "", True),
        ("flags : fpu amx_bf16", "AVX10_1_512_AMX", True),
        ("flags : fpu avx512_bf16", "AVX512_CORE_VNNI", False),
        ("flags : fpu avx512_bf16", "AVX2", False),
        ("flags : fpu avx512dq avx512_vnni", "AVX512_CORE_BF16", False),
        ("Features : asimd bf16", "AVX512_CORE_BF16", True),
        ("Features : asimd", "", False),
        ("model name : bf16", "", False),
        ("", "", False),
    ],
)
def test_who_multiplies_bfloat16(flags: str, max_isa: str, native: bool) -> None:
    assert multiplies_bfloat16(f"processor : 0\n{flags}\n", max_isa) == native
