"""How many KV blocks a worker has.

`num_blocks` decides if given, else `kv_cache_gib`, else the machine: 60 % of what is available once the weights are
loaded, but on CPU no more than 4 GiB (a quarter of what is available, where that is more), and nowhere more than
`max_rows` requests of `max_model_len` tokens can use. Available is the least of free memory and of what the control
group leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.kv_cache import KVShape

GIB = 1024**3
SHARE = 0.6
CPU_CAP_BYTES = 4 * GIB


class MemoryNeeds(Protocol):
    """What of a loaded model matters here."""

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class NotEnoughMemory(ValueError):
    """The KV cache would not hold one request of the longest allowed length."""


def num_kv_blocks(config: WorkerConfig, loaded: MemoryNeeds, draft: MemoryNeeds | None = None) -> int:
    """KV blocks for this worker; each is one of the model's and, if there is a draft model, one of its own.

    Raises:
        NotEnoughMemory: not even one request of max_model_len tokens would fit; the message names the options.
    """
    models = (loaded,) if draft is None else (loaded, draft)
    bytes_per_block = sum(model.kv_shape.bytes_per_block(config.block_size) for model in models)
    blocks_per_request = -(-loaded.max_model_len // config.block_size)
    if config.num_blocks:
        blocks, source = config.num_blocks, f"num_blocks={config.num_blocks}"
    elif config.kv_cache_gib:
        blocks, source = int(config.kv_cache_gib * GIB) // bytes_per_block, f"kv_cache_gib={config.kv_cache_gib:g}"
    else:
        available = available_bytes(loaded.device)
        usable = usable_bytes(available, loaded.device)
        blocks = min(usable // bytes_per_block, config.max_rows * blocks_per_request)
        source = f"{usable / GIB:.2f} GiB usable of {available / GIB:.2f} GiB available"
    if blocks < blocks_per_request:
        raise NotEnoughMemory(
            f"the KV cache holds {blocks * config.block_size} tokens ({source}, "
            f"{bytes_per_block / config.block_size / 1024:.1f} KiB per token), but max_model_len is "
            f"{loaded.max_model_len}: lower max_model_len, or raise kv_cache_gib or num_blocks"
        )
    return blocks


def usable_bytes(available: int, device: torch.device) -> int:
    """The share of the available memory that the cache takes when nothing was configured."""
    if device.type != "cpu":
        return int(available * SHARE)
    return int(min(available * SHARE, max(CPU_CAP_BYTES, available / 4)))


def available_bytes(device: torch.device) -> int:
    """Memory a new allocation on `device` may take now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_available_bytes(Path("/"))


def host_available_bytes(root: Path) -> int:
    """The least of MemAvailable and what control groups (v2, v1) leave; `root` is "/" except in tests."""
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
    return min(bounds, default=CPU_CAP_BYTES)


def _meminfo(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _headroom(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Limit minus usage, not counting file pages that the kernel gives back on demand (the mapped weights)."""
    bound, used = _lines(group / limit), _lines(group / usage)
    if not bound or not used or not bound[0].isdigit():
        return None
    stat = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
    return max(0, int(bound[0]) - int(used[0]) + int(stat.get(reclaimable, 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
