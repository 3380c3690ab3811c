"""Where compute threads run: one per physical core of the affinity mask, and no more than the control group's CPU
quota.

Threads that share a core share its arithmetic units; threads beyond the quota stall one another at every barrier.
Threads are bound only if every core of the mask gets one, so that there is none to move to; with a quota below the
mask's whole time, others compute there too, and the system places threads better than we can.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/")
ANYWHERE = -1


def available_cores(root: Path = ROOT, mask: Iterable[int] | None = None) -> int:
    """Cores this process may compute on at once, at least 1; siblings of one core count once."""
    cores = len(one_of_each_core(root, mask))
    quota = cpu_quota(root / "sys/fs/cgroup")
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def placement(num_threads: int, root: Path = ROOT, mask: Iterable[int] | None = None) -> list[int]:
    """A CPU for each thread, or ANYWHERE; 0 threads means one per core."""
    cpus = one_of_each_core(root, mask)
    count = num_threads or available_cores(root, mask)
    return cpus if count == len(cpus) == available_cores(root, mask) else [ANYWHERE] * count


def one_of_each_core(root: Path = ROOT, mask: Iterable[int] | None = None) -> list[int]:
    """The first CPU of each physical core in the affinity mask."""
    first: dict[str, int] = {}
    for cpu in sorted(_affinity() if mask is None else mask):
        siblings = system_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings.strip() or f"cpu {cpu}", cpu)
    return list(first.values())


def cpu_quota(cgroup: Path = ROOT / "sys/fs/cgroup") -> float | None:
    """CPU time that the control group grants, in cores; None means no limit."""
    limit = system_text(cgroup / "cpu.max").split()
    if not limit:
        parts = (system_text(cgroup / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        limit = " ".join(parts).split()
    if len(limit) != 2 or limit[0] in ("max", "-1") or int(limit[1]) == 0:
        return None
    return int(limit[0]) / int(limit[1])


def _affinity() -> Iterable[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def system_text(path: Path) -> str:
    """The contents of a system file; empty if it does not exist."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
