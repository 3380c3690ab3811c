"""How the machine's cores are detected, and where threads are placed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda_worker.config import WorkerConfig
from pagoda_worker.cores import ANYWHERE, available_cores, one_of_each_core, placement


def machine(root: Path, siblings: list[str], quota: str = "max") -> Path:
    """`siblings`: for each CPU, the CPUs on its core, in the kernel's format."""
    for cpu, text in enumerate(siblings):
        directory = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(text + "\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text(f"{quota} 100000\n")
    return root


APART = ["0", "1", "2", "3"]
PAIRS = ["0,2", "1,3", "0,2", "1,3"]


@pytest.mark.parametrize(
    ("siblings", "quota", "mask", "num_threads", "placed"),
    [
        (APART, "max", {0, 1, 2, 3}, 0, [0, 1, 2, 3]),
        (APART, "400000", {0, 1, 2, 3}, 0, [0, 1, 2, 3]),
        (APART, "max", {1, 3}, 0, [1, 3]),  # only the cores of the mask
        (APART, "200000", {0, 1, 2, 3}, 0, [ANYWHERE] * 2),  # others compute on these cores too
        (APART, "200000", {0, 1, 2, 3}, 4, [ANYWHERE] * 4),
        (APART, "50000", {0, 1, 2, 3}, 0, [ANYWHERE]),
        (APART, "200000", {2, 3}, 0, [2, 3]),
        (APART, "max", {0, 1, 2, 3}, 2, [ANYWHERE] * 2),  # one of two workers
        (PAIRS, "max", {0, 1, 2, 3}, 0, [0, 1]),
        (PAIRS, "max", {0, 1, 2, 3}, 4, [ANYWHERE] * 4),
        (PAIRS, "max", {2, 3}, 0, [2, 3]),
        (PAIRS, "max", {0, 2}, 0, [0]),
    ],
)
def test_a_thread_per_core_bound_only_where_all_of_the_mask_is_ours(
    tmp_path: Path, siblings: list[str], quota: str, mask: set[int], num_threads: int, placed: list[int]
) -> None:
    root = machine(tmp_path, siblings, quota)
    assert placement(num_threads, root, mask) == placed
    if not num_threads:
        assert available_cores(root, mask) == len(placed)


def test_a_system_that_tells_nothing_has_the_cores_of_the_mask(tmp_path: Path) -> None:
    assert one_of_each_core(tmp_path, {4, 6}) == [4, 6]
    assert available_cores(tmp_path, {4, 6}) == 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity masks here")
def test_here_threads_stay_inside_the_mask() -> None:
    assert set(placement(0)) <= {ANYWHERE, *os.sched_getaffinity(0)}


def test_a_worker_that_is_told_no_number_of_threads_takes_the_cores_it_has() -> None:
    """A worker process and the offline LLM settle their configuration alike."""
    assert WorkerConfig().settled("cpu").threads == available_cores()
    assert WorkerConfig(threads=3).settled("cpu").threads == 3
