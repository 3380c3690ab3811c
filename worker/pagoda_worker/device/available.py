"""How much memory is available to a model."""

from __future__ import annotations

from pathlib import Path

import torch

from pagoda_worker.cores import system_text

GIB = 1024**3
UNKNOWN_BYTES = 4 * GIB  # for a host that reports nothing


def available_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or available memory of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_available_bytes(Path("/"))


def host_available_bytes(root: Path) -> int:
    """The least of MemAvailable and the headroom in control groups (v2, v1); `root` is "/" except in tests."""
    bounds = [
        available
        for available in (
            _meminfo(root / "proc/meminfo"),
            _headroom(root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
            _headroom(
                root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            ),
        )
        if available is not None
    ]
    return min(bounds, default=UNKNOWN_BYTES)


def _meminfo(path: Path) -> int | None:
    for line in system_text(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _headroom(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Limit minus usage, not counting file pages that the kernel frees on demand (the mapped weights)."""
    bound, used = system_text(group / limit).split(), system_text(group / usage).split()
    if not bound or not used or not bound[0].isdigit():
        return None
    stat = dict(line.split()[:2] for line in system_text(group / "memory.stat").splitlines())
    return max(0, int(bound[0]) - int(used[0]) + int(stat.get(reclaimable, 0)))
