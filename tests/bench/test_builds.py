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


@needs_library
@pytest.mark.parametrize(
    ("library", "more", "message"),
    [
        ("no.so", [], "there is no file no.so"),
        ("text.so", [], "text.so: file too short"),
        (LIBRARY, ["--quantization", "int3"], "int3"),
        (LIBRARY, ["--instruction-set", "mmx"], "mmx"),
    ],
)
def test_what_cannot_be_compared_is_told(library: Path | str, more: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    command = [sys.executable, builds.__file__, MODEL, str(LIBRARY), str(library), *more]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


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

    sides = []

    def run(small: Small, batch: object) -> tuple[torch.Tensor]:
        sides.append(small._library is steps.libraries[1])
        return Small.run(small, batch)

    monkeypatch.setattr(steps, "_run", run)
    for _ in range(3):
        steps.run(Small(), OneToken())  # type: ignore[arg-type]
    assert steps.different == 3
    assert len(steps.pairs[1]) == 3
    assert sides == [False, True, True, False, False, True]


def test_bits_of_nan_count() -> None:
    nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert builds.same(nan, nan.clone())
    assert not builds.same(nan, nan.flip(0))
