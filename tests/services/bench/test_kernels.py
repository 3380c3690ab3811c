"""`pagoda bench kernels`: what it prints, writes and draws. What it measures: tests/worker/kernels/test_roofline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagoda.bench import kernels, plot
from pagoda.cli import main
from pagoda.settings.problems import ConfigError
from pagoda_worker.kernels.cpu.build import LIBRARY

needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler here; there is nothing to measure")

SHAPE = "hidden=64,middle=96,heads=2,kv_heads=1,head_dim=32,vocab=96"
QUICK = ["--cold-mib", "0", "--repeats", "1", "--max-tokens", "16", "--threads", "1"]


def report(**changes: Any) -> dict[str, Any]:
    ceilings = [{"read": 10e9, "bf16": 100e9, "int8": 200e9}, {"read": 12e9, "bf16": 90e9, "int8": 200e9}]
    point = {
        "op": "linear bf16", "shape": "qkv 1 x 2 -> 3", "seconds": 2e-6, "num_bytes": 8e3, "operations": 16e3,
        "unit": "bf16", "bytes_per_s": 4e9, "operations_per_s": 8e9, "share": 0.4,
    }  # fmt: skip
    points = [point, point | {"op": "rms norm", "operations": 0.0, "operations_per_s": 0.0}]
    return {"shape": "b600m", "level": "avx2", "threads": 2, "ceilings": ceilings, "points": points} | changes


@needs_library
def test_the_command_measures_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "report.json", tmp_path / "roof.png"
    words = ["bench", "kernels", "--shape", SHAPE, "--formats", "bf16", "--only", "linear", *QUICK]
    assert main([*words, "--instruction-set", "base", "--json", str(out), "--plot", str(picture)]) == 0
    written = json.loads(out.read_text())
    assert (written["shape"], written["level"], written["threads"]) == ("custom", "base", 1)
    assert len(written["ceilings"]) == len(written["points"]) + 1
    assert {point["op"] for point in written["points"]} == {"linear bf16"}
    assert all(point["share"] > 0 for point in written["points"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "read bandwidth" in printed
    assert "gate_up 16 x 64 -> 192" in printed


@needs_library
def test_several_instruction_sets_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    chosen = ["--formats", "bf16", "--only", "linear,embed", "--rows", "3,5"]
    words = ["bench", "kernels", "--shape", SHAPE, *QUICK, *chosen]
    assert main([*words, "--instruction-set", "base,base", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [one["level"] for one in written] == ["base", "base"]
    shapes = {point["shape"] for point in written[0]["points"] if point["op"] == "linear bf16"}
    assert {shape.split(" x ")[0].split()[1] for shape in shapes} == {"3", "5"}
    assert {point["op"] for point in written[0]["points"]} == {"linear bf16", "embed"}
    assert capsys.readouterr().out.count("custom at level base") == 2
    quick = ["bench", "kernels", "--shape", SHAPE, *QUICK, "--only", "embed"]
    assert main([*quick, "--instruction-set", "all"]) == 0
    assert "custom at level base" in capsys.readouterr().out


@needs_library
def test_only_the_ceilings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert main(["bench", "kernels", "--ceilings", "--shape", SHAPE, *QUICK, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert (written["points"], len(written["ceilings"])) == ([], 2)
    assert "of ceiling" not in capsys.readouterr().out


@needs_library
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--shape", "b7"], "shape must be one of"),
        (["--formats", "bf16,int3"], "got int3"),
        (["--instruction-set", "sse"], "not 'sse'"),
        (["--instruction-set", "base,avx2", "--plot", "roof.png"], "needs a single instruction set, got base, avx2"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *words]) == 2
    assert problem in capsys.readouterr().err


def test_the_heading_tells_of_drift() -> None:
    lines = kernels.heading(report()).splitlines()
    assert lines[0] == "b600m at level avx2, 2 threads"
    assert " ".join(lines[1].split()) == "read bandwidth 10.0 before, 12.0 GB/s after (drift +20.0%; 10.0 .. 12.0 of 2)"
    assert "drift -10.0%" in lines[2]


def test_a_plot_has_the_points_that_multiply(tmp_path: Path) -> None:
    assert plot.drawable(report()["points"]) == {"linear bf16": [(2.0, 8e9, "qkv 1 x 2 -> 3")]}
    plot.draw(report(points=[]), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagoda-serve\[bench\]'"):
        plot.require()
    assert main(["bench", "kernels", "--shape", SHAPE, *QUICK, "--plot", str(tmp_path / "x.png")]) == 2
