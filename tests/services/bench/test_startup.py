"""`pagoda bench startup`: the parts of a start, and real starts of the demo model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pagoda.bench.startup import Server, drop_from_cache, medians, parts, read_files_s, serve_command
from pagoda.cli import main
from pagoda.settings.problems import ConfigError

SAID = [
    (0.5, "anything"),
    (1.0, '{"message": "kernels: native (the best for cpu)"}'),
    (3.0, '{"message": "weights read and packed in 1.98 s"}'),
    (3.25, '{"message": "first step computed 0.25 s later"}'),
    (3.5, '{"message": "registered as epoch 1 of engine core x"}'),
]


def test_the_parts_add_up_to_the_whole() -> None:
    found = parts(SAID, 4.0)
    assert found == {"imports": 1.0, "weights": 2.0, "first_step": 0.25, "registration": 0.25, "readiness": 0.5}


def test_what_was_not_logged_is_part_of_the_next() -> None:
    assert parts([SAID[1], SAID[4]], 4.0) == {"imports": 1.0, "registration": 2.5, "readiness": 0.5}
    assert parts([], 4.0) == {"readiness": 4.0}


def test_a_milestone_after_readiness_is_of_another_life() -> None:
    assert parts([SAID[1], (9.0, "registered as epoch 2")], 4.0) == {"imports": 1.0, "readiness": 3.0}


def test_medians_of_what_every_run_has() -> None:
    runs = [
        {"ready_s": 1.0, "first_token_s": 1.5, "read_s": 0.1, "parts_s": {"imports": 0.5, "readiness": 0.5}},
        {"ready_s": 3.0, "first_token_s": 3.5, "read_s": 0.3, "parts_s": {"readiness": 3.0}},
    ]
    found = medians(runs)
    assert (found["ready_s"], found["first_token_s"], found["parts_s"]) == (2.0, 2.5, {"readiness": 1.75})


def test_options_are_handed_on() -> None:
    command = serve_command({"model": "m", "max_rows": "8", "fallback": False, "port": "8123"})
    assert command[:4] == [sys.executable, "-m", "pagoda.cli", "serve"]
    assert command[4:] == ["--port=8123", "--model=m", "--max-rows=8", "--no-fallback", "--log-json"]
    assert serve_command({})[4:] == ["--port=0", "--log-json"]


def test_files_are_read_from_end_to_end_also_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"x" * 100_000)
    drop_from_cache([path])
    assert read_files_s([path, path]) > 0
    assert path.read_bytes() == b"x" * 100_000


@pytest.mark.parametrize(
    ("program", "problem"),
    [("print('no weights here')", "exited before it was ready:\nno weights here"), ("input()", "exited before")],
)
def test_a_server_that_ends_is_told_with_its_last_words(program: str, problem: str) -> None:
    with (
        pytest.raises(ConfigError, match=problem),
        Server([sys.executable, "-c", program], timeout_s=60.0) as server,
    ):
        server.wait_until_ready()


def test_a_server_that_is_too_slow_is_stopped() -> None:
    with (
        pytest.raises(ConfigError, match=r"not ready within 0\.2 s"),
        Server([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.2) as server,
    ):
        server.wait_until_ready()
    assert server._process.returncode is not None


@pytest.mark.e2e
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    words = ["--runs", "1", "--cold", "--num-blocks", "64", "--max-model-len", "64", "--threads", "1"]
    assert main(["bench", "startup", *words, "--data-dir", str(tmp_path / "d"), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (run,) = report["runs"]
    assert run["read_s"] > 0
    assert 0 < run["ready_s"] < run["first_token_s"]
    assert set(run["parts_s"]) == {"imports", "weights", "first_step", "registration", "readiness"}
    assert sum(run["parts_s"].values()) == pytest.approx(run["ready_s"])
    assert "of it imports" in capsys.readouterr().out
