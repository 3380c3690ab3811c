"""Runs in a separate process: other tests influence the heap of this one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

LOADING = """
from pathlib import Path
import torch
from pagoda_worker.loading.heap import give_back

def tell_mib():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    print(int(status.split("RssAnon:")[1].split()[0]) // 1024)

torch.ones(13 << 20, dtype=torch.uint8)  # from here on glibc cuts copies of this size from its heap
tell_mib()
copies, kept = [], []
for _ in range(40):
    copies.append(torch.ones(4 << 20, dtype=torch.uint8))
    kept.append(torch.ones(1 << 16))  # large enough that no hole of what was imported takes it
del copies
tell_mib()
give_back()
tell_mib()
assert all(bool((one == 1).all()) for one in kept)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's heap that has holes")
def test_holes_that_copies_leave_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=True, timeout=120)
    before, holed, after = map(int, done.stdout.split())
    assert holed > before + 100
    assert after < before + 20
