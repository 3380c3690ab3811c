from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pagoda.processes import startup
from pagoda.processes.logs import as_entry


@pytest.mark.parametrize("line", ['E0000 handshake failed: "no" \x1b[31m', "{'a': 1}", "{", '{"a": 1} and more', "1"])
def test_a_line_of_a_library_is_an_entry_of_its_process(line: str) -> None:
    entry = json.loads(as_entry("worker-1", line))
    assert (entry["process"], entry["level"], entry["message"]) == ("worker-1", "info", line)
    assert set(entry) == {"time", "level", "process", "logger", "message"}


def test_an_entry_stays_as_it_is() -> None:
    entry = as_entry("engine-core", "once")
    assert as_entry("worker-1", entry) == entry


def test_a_log_for_machines_has_nothing_else(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    view = startup.StartupView(as_json=True)
    view.on_line("worker-1", "said by a library")
    view.announce("\nPagoda serves it at there (ready in 1.0 s)\n\n  curl")
    out, err = capfd.readouterr()
    assert out == ""
    assert json.loads(err.splitlines()[0])["process"] == "worker-1"
    assert [record.getMessage() for record in caplog.records] == ["Pagoda serves it at there (ready in 1.0 s)"]


def test_a_warning_of_a_library_is_an_entry() -> None:
    program = "import warnings; from pagoda.processes import logs; logs.setup('worker-1', 'info', True)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; warnings.warn('is old', UserWarning)"], capture_output=True, check=True
    )
    (entry,) = map(json.loads, done.stderr.splitlines())
    assert (entry["process"], entry["level"]) == ("worker-1", "warning")
    assert "is old" in entry["message"]


def test_an_entry_is_one_line_of_json_whatever_the_encoding_of_the_output_and_whoever_splits_it() -> None:
    program = "import logging; from pagoda.processes import logs; logs.setup('worker-1', 'info', True)"
    said = "é\u2028\x85\U0001f600\udcff"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; logging.info('%s', {said!a})"],
        capture_output=True, check=True, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    (line,) = done.stderr.decode().splitlines()
    assert json.loads(line)["message"] == said
