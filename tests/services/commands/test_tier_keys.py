"""A tier whose keys are no good says so in one line and ends with the exit code of a configuration that cannot work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.processes.exit_codes import EXIT_CONFIG
from pagoda.tools.keygen import generate

WORDS = {
    "engine-core": ("--listen=127.0.0.1:0", "--worker-endpoint=tcp://127.0.0.1:0"),
    "worker": ("--engine=tcp://127.0.0.1:1",),
}


def refused(role: str, keys: Path) -> str:
    """The line that a tier with these keys ends with."""
    command = [sys.executable, "-m", "pagoda.cli", role, *WORDS[role], f"--keys-dir={keys / role}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == EXIT_CONFIG, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if " ERROR " in line)
    assert "Traceback" not in done.stderr
    return line


@pytest.mark.parametrize("role", ["engine-core", "worker"])
def test_a_secret_that_is_none_is_one_line_and_exit_code_2(role: str, tmp_path: Path) -> None:
    generate(tmp_path)
    (tmp_path / role / "curve.secret").write_text('"' * 40)
    assert f"{role}/curve.secret is not a CURVE key" in refused(role, tmp_path)
