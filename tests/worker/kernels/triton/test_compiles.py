"""The interpreter accepts what the compiler rejects, so every launch is compiled to machine code; this needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
KERNELS = {
    "walk_kernel", "split_kernel", "fold_kernel", "norm_kernel", "act_mul_kernel", "embed_kernel",
    "rope_write_kernel", "shrink_kernel", "expand_kernel", "place_kernel", "product_kernel", "combine_kernel",
    "prepare_kernel", "weigh_kernel", "choose_kernel", "report_kernel",
}  # fmt: skip
# Capability -> bytes of shared memory that a program may use, from the vendor's tables.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("capability", [int(one) for one in metafunc.config.getoption("--capabilities").split(",")])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_launch_compiles(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    program = [sys.executable, "-m", "tests.worker.kernels.triton.launches"]
    program += [str(capability), str(SHARED_MEMORY[capability])]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    launches = [line.split() for line in done.stdout.splitlines()]
    assert {kernel for kernel, _, _ in launches} == KERNELS
    assert max(int(shared) for _, shared, _ in launches) <= SHARED_MEMORY[capability]
    assert all(made == "True" for _, _, made in launches)
