"""bench/builds.py: every step is computed by both builds, and no other bit goes unnoticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gguf_files import DEMO

from bench import builds
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.cpu.library import Library

MODEL = str(DEMO)
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; there is nothing to compare")


@needs_library
def test_two_builds_take_turns(tmp_path: Path) -> None:
    shutil.copy(LIBRARY, copy := tmp_path / "copy.so")
    command = [sys.executable, builds.__file__, MODEL, str(LIBRARY), str(copy), "--rows", "2", "--output-len", "8"]
    *steps, bits = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any(line.startswith("steps of 2 tokens: ") and "old / new" in line for line in steps)
    assert bits == "steps with other bits: 0"
    missing = subprocess.run([*command[:4], str(tmp_path / "no.so")], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "no.so" in missing.stderr


@needs_library
def test_other_bits_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(LIBRARY, other := tmp_path / "other.so")
    steps = builds.Steps((LIBRARY, other), "")

    class Small:
        _library: Library

        def run(self, batch: object) -> tuple[torch.Tensor]:
            return (torch.tensor([1.0, -0.0 if self._library is steps.libraries[1] else 0.0]),)

    class OneToken:
        num_tokens = 1

    monkeypatch.setattr(steps, "_run", Small.run)
    for _ in range(3):
        steps.run(Small(), OneToken())  # type: ignore[arg-type]
    assert steps.different == 3
    assert len(steps.pairs[1]) == 3


def test_bits_of_nan_count() -> None:
    nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert builds.same(nan, nan.clone())
    assert not builds.same(nan, nan.flip(0))
