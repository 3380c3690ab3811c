"""A tier with unusable keys says so in one line and exits with the code of a configuration that cannot work."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pagoda.processes.exit_codes import EXIT_CONFIG
from pagoda.tools.keygen import generate

WORDS = {
    "engine-core": ("--listen=127.0.0.1:0", "--worker-endpoint=tcp://127.0.0.1:0"),
    "gateway": ("--engine=127.0.0.1:1", "--port=0"),
    "worker": ("--engine=tcp://127.0.0.1:1",),
}


def command(role: str, keys: Path) -> list[str]:
    return [sys.executable, "-m", "pagoda.cli", role, *WORDS[role], f"--keys-dir={keys / role}"]


def refused(role: str, keys: Path) -> str:
    """The error line of a tier that refuses these keys."""
    done = subprocess.run(command(role, keys), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == EXIT_CONFIG, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if " ERROR " in line)
    assert "Traceback" not in done.stderr
    return line


@pytest.mark.parametrize("role", ["engine-core", "worker"])
def test_a_secret_that_is_none_is_one_line_and_exit_code_2(role: str, tmp_path: Path) -> None:
    generate(tmp_path)
    (tmp_path / role / "curve.secret").write_text('"' * 40)
    assert f"{role}/curve.secret is not a CURVE key" in refused(role, tmp_path)


@pytest.mark.parametrize("role", ["engine-core", "gateway"])
def test_a_certificate_of_another_time_is_one_line_and_exit_code_2(role: str, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    generate(tmp_path / "old", 1, now=now - timedelta(days=2))
    generate(tmp_path / "new", 1, now=now + timedelta(days=2))
    ended = now - timedelta(days=1)
    assert f"{role}/tls.crt: its certificate expired on {ended:%Y-%m-%d %H:%M} UTC" in refused(role, tmp_path / "old")
    assert f"{role}/tls.crt: its certificate is not valid before" in refused(role, tmp_path / "new")


PAGES = {
    "engine-core": (("--metrics-port=0",), r"metrics=(\S+)", "", "pagoda_engine_core_certificate_not_after_seconds"),
    "gateway": ((), r"url=(\S+)", "/metrics", "pagoda_certificate_not_after_seconds"),
}


@pytest.mark.e2e
@pytest.mark.parametrize("role", PAGES)
def test_an_end_that_is_near_is_told_at_start_and_in_a_metric(role: str, tmp_path: Path) -> None:
    words, url, path, metric = PAGES[role]
    now = datetime.now(UTC).replace(microsecond=0)
    end = now + timedelta(days=29)
    generate(tmp_path, 29, now=now)
    with subprocess.Popen([*command(role, tmp_path), *words], stderr=subprocess.PIPE, text=True) as tier:
        assert tier.stderr is not None
        page = warning = ""
        try:
            while not (page and warning):
                line = tier.stderr.readline()
                assert line, "it ended"
                if "event=listening" in line and (match := re.search(url, line)):
                    page = match[1] + path
                if " WARNING " in line and "tls.crt" in line:
                    warning = line
            assert f"{role}/tls.crt: its certificate expires on {end:%Y-%m-%d %H:%M} UTC" in warning
            with urllib.request.urlopen(page, timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            (value,) = (line.split()[1] for line in lines if line.startswith(f"{metric} "))
            assert float(value) == end.timestamp()
        finally:
            tier.send_signal(signal.SIGTERM)
            tier.communicate()
