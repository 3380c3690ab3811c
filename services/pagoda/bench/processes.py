"""Processor time and memory of other processes, from /proc."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 1024**2


@dataclass
class Seen:
    name: str
    cpu_at_start_s: float
    cpu_s: float
    rss_bytes: int
    rss_peak_bytes: int


class ProcessWatch:
    """Samples processes, and optionally all their descendants, from `start` to `report`."""

    def __init__(self, pids: Sequence[int], descendants: bool, every_s: float = 0.5) -> None:
        self._pids = pids
        self._descendants = descendants
        self._every_s = every_s
        self._seen: dict[int, Seen] = {}
        self._started = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._started = time.perf_counter()
        self._sample()
        self._task = asyncio.create_task(self._run())

    def report(self) -> list[dict[str, Any]]:
        """Stop sampling; one entry per process."""
        if self._task is not None:
            self._task.cancel()
        self._sample()
        wall_s = time.perf_counter() - self._started
        return [
            {
                "pid": pid,
                "name": seen.name,
                "cpu_s": round(seen.cpu_s - seen.cpu_at_start_s, 2),
                "cpu_percent": round(100 * (seen.cpu_s - seen.cpu_at_start_s) / wall_s, 1),
                "rss_mib": round(seen.rss_bytes / MIB, 1),
                "rss_peak_mib": round(seen.rss_peak_bytes / MIB, 1),
            }
            for pid, seen in self._seen.items()
        ]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._sample()

    def _sample(self) -> None:
        pids = family(self._pids) if self._descendants else self._pids
        for pid in pids:
            with contextlib.suppress(OSError):
                cpu_s, rss_bytes = usage(pid)
                seen = self._seen.setdefault(pid, Seen(_name(pid), cpu_s, cpu_s, rss_bytes, rss_bytes))
                seen.cpu_s, seen.rss_bytes = cpu_s, rss_bytes
                seen.rss_peak_bytes = max(seen.rss_peak_bytes, rss_bytes)


def usage(pid: int) -> tuple[float, int]:
    """Processor seconds (user and system) and resident bytes. Raises OSError if there is no such process."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(fields[21]) * PAGE_BYTES


def family(roots: Sequence[int]) -> list[int]:
    """These processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found, todo = [], list(roots)
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo.extend(children.get(pid, ()))
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name, which may contain any character: state, ppid, .."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()[:4]  # a process may have changed it
    return b" ".join(words).decode("utf-8", "replace")[:80]
