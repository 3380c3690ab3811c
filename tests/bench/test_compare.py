"""bench/compare.py from start to end with real servers of the demo model, and its table."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.compare import table
from rich.console import Console

import pagoda
from pagoda_worker.kernels.cpu.build import LIBRARY

DEMO = Path(pagoda.__file__).parent / "demo_model"
SCRIPT = Path(__file__).parents[2] / "bench/compare.py"


def test_the_table_has_medians_ratios_start_up_and_idling() -> None:
    figures = {
        "greedy-8": {"a": [10.0, 20.0, 30.0], "b": [5.0, 5.0, 10.0]},
        "top-p-8": {"a": [5.0, 5.0, 5.0], "b": [5.0, 5.0, 5.0]},
    }
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(figures, {"a": [1.5], "b": [80.0, 90.0]}, {"a": 0.01, "b": 0.5}))
    text = console.export_text()
    assert "3.00 (2.00-4.00)" in text
    assert "0.25 (0.17-0.50)" in text
    assert "85.00" in text
    assert "0.01" in text


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; there is no ceiling to measure by")
def test_two_sides_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ["--pagoda", "plain=--threads 1", "--pagoda", "torch=--threads 1 --kernels torch", "--rounds", "1"]
    words += ["--workloads", "decode-1", "--idle-s", "0.5", "--max-model-len", "256", "--kv-gib", "0.1"]
    command = [sys.executable, str(SCRIPT), str(DEMO), *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {side: len(values) for side, values in result["figures"]["decode-1"].items()} == {"plain": 1, "torch": 1}
    assert set(result["idle_cpu_s"]) == set(result["startup_s"]) == {"plain", "torch"}
    assert len(result["ceilings"]) == 2
    assert "bf16 ceiling" in done.stdout
