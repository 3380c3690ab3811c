from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEALT = "from tests.distribution import pytest_xdist_make_scheduler"
DIES = "import os\ndef test_before(): pass\ndef test_dies(): os._exit(1)\ndef test_after(): pass\n"


def closing_line(tests: Path, *words: str) -> str:
    (tests / "conftest.py").write_text(DEALT)
    (tests / "pytest.ini").write_text("")
    # Every process that dies is replaced, so each loads only the plugins it needs.
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    command += ["--dist=loadfile", "--no-loadscope-reorder"]
    done = subprocess.run(
        [*command, *words],
        cwd=tests,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return re.sub(r" in [0-9.]+s.*", "", done.stdout.splitlines()[-1].strip("= "))


def test_a_process_that_dies_ends_one_test_and_the_others_run_once(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"test_{number}_done.py").write_text("def test_one(): pass\n")
    (tmp_path / "test_6_dies.py").write_text(DIES)
    (tmp_path / "test_7_last.py").write_text("def test_last(): pass\n")
    assert closing_line(tmp_path, "-n", "1") == "1 failed, 9 passed"
    assert closing_line(tmp_path, "-n", "2") == "1 failed, 9 passed"


def test_processes_die_while_others_start(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(DIES)
    assert closing_line(tmp_path, "-n", "3") == "6 failed, 12 passed"


def test_a_process_dies_in_the_last_test(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): pass\n")
    (tmp_path / "test_b.py").write_text("import os\ndef test_dies(): os._exit(1)\n")
    assert closing_line(tmp_path, "-n", "2") == "1 failed, 1 passed"


def test_one_process_in_three_begins_at_the_other_end(tmp_path: Path) -> None:
    tells = "import os, pathlib\ndef test_one(): pathlib.Path(__file__).with_suffix('').write_text(os.environ[{!r}])\n"
    names = [f"test_{number}" for number in range(9)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(tells.format("PYTEST_XDIST_WORKER"))
    assert closing_line(tmp_path, "-n", "3") == "9 passed"
    done_by = {name: (tmp_path / name).read_text() for name in names}
    one_in_three = {name for name in names if done_by[name] == done_by["test_8"]}
    assert one_in_three == {"test_6", "test_7", "test_8"}
