"""The private directory of a run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagoda.processes.rundir import LONGEST, runtime_dir
from pagoda.settings.problems import ConfigError


def test_it_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with runtime_dir(str(tmp_path / "data")) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.parent == tmp_path / "data"
    assert list((tmp_path / "data").iterdir()) == []


def test_two_runs_have_two_directories(tmp_path: Path) -> None:
    with runtime_dir(str(tmp_path)) as one, runtime_dir(str(tmp_path)) as two:
        assert one != two
        assert one.exists()


def test_what_a_killed_run_left_is_swept_up(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pagoda.processes.rundir import runtime_dir
with runtime_dir({str(tmp_path)!r}) as path:
    (path / "core-0.sock").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    with runtime_dir(str(tmp_path)) as path:
        assert list(tmp_path.iterdir()) == [path]
        assert left != path


def test_a_stranger_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pagoda-mine").mkdir()
    with runtime_dir(str(tmp_path)):
        assert (tmp_path / "pagoda-mine").exists()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_dir must be shorter"), runtime_dir(str(tmp_path / ("x" * LONGEST))):
        pass


def test_a_path_with_a_comma_would_be_two_addresses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_dir must not contain a comma"), runtime_dir(str(tmp_path / "a,b")):
        pass


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create a runtime directory"), runtime_dir(str(tmp_path / "file")):
        pass


def test_without_a_place_of_its_own_the_users_runtime_directory_is_taken(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    with runtime_dir("") as path:
        assert path.parent == place
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/place")
    with runtime_dir("") as path:
        assert os.access(path, os.W_OK)


def test_runs_that_begin_at_once_do_not_sweep_each_other(tmp_path: Path) -> None:
    def begin(_: int) -> bool:
        with runtime_dir(str(tmp_path)) as path:
            (path / "core-0.sock").touch()
            return path.is_dir()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(begin, range(2000)))
    assert list(tmp_path.iterdir()) == []
