"""How many KV blocks a worker takes, and from what it learns how much memory there is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from pagoda_worker import memory
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.memory import GIB, NotEnoughMemory, host_available_bytes, num_kv_blocks, usable_bytes

SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)  # 2 KiB per token
CPU = torch.device("cpu")


@dataclass
class Needs:
    kv_shape: KVShape = SHAPE
    max_model_len: int = 1024
    device: torch.device = field(default=CPU)


def test_bytes_of_a_token() -> None:
    assert SHAPE.bytes_per_token == 2 * 2 * 64 * 4 * 2
    assert SHAPE.bytes_per_block(32) == 32 * 2048


def test_a_quantised_cache_counts_its_scales() -> None:
    rounded = replace(SHAPE, quantized=True)
    assert rounded.bytes_per_token == 2 * 2 * (64 + 4) * 4
    assert num_kv_blocks(WorkerConfig(kv_cache_gib=0.5), Needs(rounded)) == GIB // 2 // (32 * 1088)


def test_blocks_as_configured() -> None:
    assert num_kv_blocks(WorkerConfig(num_blocks=40, kv_cache_gib=1), Needs()) == 40


def test_blocks_from_gib() -> None:
    assert num_kv_blocks(WorkerConfig(kv_cache_gib=0.5), Needs()) == GIB // 2 // (32 * 2048)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WorkerConfig(num_blocks=31), r"992 tokens \(num_blocks=31, 2.0 KiB per token\), but max_model_len is 1024"),
        (
            WorkerConfig(kv_cache_gib=0.001),
            "kv_cache_gib=0.001.*lower max_model_len, or raise kv_cache_gib or num_blocks",
        ),
    ],
)
def test_too_little_names_the_options(config: WorkerConfig, message: str) -> None:
    with pytest.raises(NotEnoughMemory, match=message):
        num_kv_blocks(config, Needs())


def test_automatic_takes_no_more_than_rows_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: 64 * GIB)
    assert num_kv_blocks(WorkerConfig(max_rows=4), Needs()) == 4 * 1024 // 32


def test_automatic_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: GIB)
    assert num_kv_blocks(WorkerConfig(max_rows=10**6), Needs()) == int(GIB * 0.6) // (32 * 2048)


@pytest.mark.parametrize(("available", "usable"), [(2, 1.2), (8, 4), (16, 4), (64, 16)])
def test_share_of_a_cpu_machine(available: float, usable: float) -> None:
    assert usable_bytes(int(available * GIB), CPU) == int(usable * GIB)


def test_share_of_a_gpu() -> None:
    assert usable_bytes(100 * GIB, torch.device("cuda:0")) == 60 * GIB


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
