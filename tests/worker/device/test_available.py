"""Where a worker learns how much memory is available."""

from __future__ import annotations

from pathlib import Path

from pagoda_worker.device.available import GIB, host_available_bytes


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8388608 kB\n"}


def test_the_machine_without_limits(tmp_path: Path) -> None:
    unlimited = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    assert host_available_bytes(files(tmp_path, MEMINFO | unlimited)) == 8 * GIB


def test_a_control_group_of_version_2(tmp_path: Path) -> None:
    limit = {
        "sys/fs/cgroup/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB}\n",
    }
    assert host_available_bytes(files(tmp_path, MEMINFO | limit)) == 2 * GIB


def test_a_control_group_of_version_1(tmp_path: Path) -> None:
    limit = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert host_available_bytes(files(tmp_path, MEMINFO | limit)) == GIB


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert host_available_bytes(tmp_path) == 4 * GIB
