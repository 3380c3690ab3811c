"""What this process may use of the machine: cores and memory, as limited by affinity and control groups, and GPUs."""

from __future__ import annotations

from pathlib import Path

from pagoda_worker.cores import available_cores as available_cores
from pagoda_worker.cores import cpu_quota as cpu_quota
from pagoda_worker.cores import system_text

_CGROUP = Path("/sys/fs/cgroup")


def memory_limit(root: Path = _CGROUP) -> int | None:
    """The control group's limit in bytes; None means no limit."""
    words = (system_text(root / "memory.max") or system_text(root / "memory/memory.limit_in_bytes")).split()
    if not words or words[0] == "max" or int(words[0]) >= 2**60:
        return None
    return int(words[0])


def memory_info(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Bytes by name (`MemTotal`, `MemAvailable`, ..); empty if the system has no such file."""
    rows = (line.split() for line in system_text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction-set flags of the first processor."""
    for line in system_text(path).splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def has_nvidia_device(devices: Path = Path("/dev")) -> bool:
    """Whether there is an NVIDIA GPU's device file; under WSL it has another name."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()
