"""How many KV blocks a worker has.

`num_blocks` decides if given, else `kv_cache_gib`, else the machine. On a CPU the cache takes 60 % of the memory
available once the weights are loaded, capped at 4 GiB or, if more, a quarter of it. Where `workers_here` share the
memory, each takes from its part: pages that another has not written yet still count as available. A restarted worker
takes as much as its first life, whatever others have written since, but at most 60 % of what is left. On a GPU the
cache takes what `gpu_memory_utilization` leaves after everything else measured there. It never takes more than
`max_rows` requests of `max_model_len` tokens can use. Available is the lesser of free memory and what the control group
leaves.

Swap space is host memory: as configured, else 4 GiB beside a GPU, but no more than a quarter of what is available. A
CPU has none: swapped blocks would lie in the same memory, where more KV blocks are of more use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pagoda_worker.config import AUTO_SWAP_SPACE, WorkerConfig
from pagoda_worker.device.available import GIB, host_available_bytes
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.loading.retention import KEEP_ALL, Kept, Retention

SHARE = 0.6
CPU_CAP_BYTES = 4 * GIB
SWAP_BYTES = 4 * GIB


class MemoryNeeds(Protocol):
    """The parts of a loaded model used here."""

    @property
    def kv_groups(self) -> tuple[KVShape, ...]: ...

    @property
    def retentions(self) -> tuple[Retention, ...]: ...

    @property
    def max_model_len(self) -> int: ...


class DeviceUse(NamedTuple):
    """Bytes of a GPU, measured with the weights loaded and without a KV cache (see `profiling`)."""

    total: int
    in_use: int  # weights, CUDA itself, and other processes
    step: int  # additional bytes of the largest step
    graphs: int  # additional bytes of recorded steps

    def for_kv_cache(self, utilization: float) -> int:
        """Bytes left for a KV cache if no more than this share of the device may ever be in use."""
        return max(0, int(self.total * utilization) - self.in_use - self.step - self.graphs)


class NotEnoughMemory(ValueError):
    """A step does not fit, or the KV cache would not hold one request of the longest allowed length."""


def num_kv_blocks(  # noqa: PLR0913 - all that memory is shared out by
    config: WorkerConfig,
    loaded: MemoryNeeds,
    draft: MemoryNeeds | None = None,
    *,
    use: Callable[[], DeviceUse] | None = None,
    spare: int = 0,
    adapters_bytes: int = 0,
    at_first: int = 0,
) -> int:
    """KV blocks of the first table (see `retention`), which determine those of the others; each comes with one of the
    draft model's, if there is a draft model.

    `use` measures that of its GPU, unless the cache's size is configured; None on a CPU. `spare` blocks are added, and
    `adapters_bytes` reserved for adapters loaded later, likewise. `at_first` bytes of a CPU's memory were available to
    the first life of this worker; 0: this is the first.

    Raises:
        NotEnoughMemory: not even one request of max_model_len tokens would fit, or a CPU's memory has no room for the
            configured size in all `workers_here`; the message names the options.
    """
    models = (loaded,) if draft is None else (loaded, draft)
    kept = Kept([group for model in models for group in model.kv_groups], loaded.retentions, config.block_size)
    if not kept.shapes:
        return 0
    row_blocks = kept.row_blocks(loaded.max_model_len)
    named = bool(config.num_blocks or config.kv_cache_gib)
    if named:
        blocks, source = _named(config, kept, use is None, at_first)
    else:
        usable, source = _usable(config, use and use(), adapters_bytes, at_first)
        blocks = max(0, min(kept.blocks_in(usable, spare), config.max_rows * row_blocks))
    if blocks < row_blocks:
        options = f"{'gpu_memory_utilization, ' if use and not named else ''}kv_cache_gib or num_blocks"
        problem = _too_few(kept, blocks, loaded.max_model_len, source)
        raise NotEnoughMemory(f"{problem}: lower max_model_len, or raise {options}")
    return blocks


def _too_few(kept: Kept, blocks: int, max_len: int, source: str) -> str:
    """Says that a row of the longest length takes more blocks than there are, and the size of a cache that holds it."""
    row_blocks = kept.row_blocks(max_len)
    needed = f"a request needs {row_blocks * kept.block_size}, " if kept.retentions[0].kept else ""
    holds = f"the KV cache holds {blocks * kept.block_size} tokens"
    takes = f"one of {max_len} takes {kept.bytes_of(row_blocks) / GIB:.3f} GiB"
    return f"{holds} ({source}, {needed}{takes}), but max_model_len is {max_len}"


def _named(config: WorkerConfig, kept: Kept, on_cpu: bool, at_first: int) -> tuple[int, str]:
    """Blocks of a cache of configured size, and the option; a CPU that lacks the memory would only fail as it fills up.

    A later life of a worker is judged like its first: what other workers have written since is no reason to refuse it.
    """
    if config.num_blocks:
        blocks, source = config.num_blocks, f"num_blocks={config.num_blocks}"
        num_bytes = kept.bytes_of(blocks)
        what = f"{source} ({num_bytes / GIB:.1f} GiB)"
    else:
        what = source = f"kv_cache_gib={config.kv_cache_gib:g}"
        num_bytes = int(config.kv_cache_gib * GIB)
        blocks = kept.blocks_in(num_bytes)
    workers = config.workers_here
    if on_cpu and num_bytes * workers > (available := at_first or host_available_bytes(Path("/"))):
        each = f" for each of {workers} workers" if workers > 1 else ""
        raise NotEnoughMemory(
            f"{what}{each} is more than the {available / GIB:.1f} GiB of memory that are available here: lower it, or "
            f"leave it out"
        )
    return blocks, source


def num_swap_blocks(
    config: WorkerConfig, shapes: Sequence[KVShape], on_cpu: bool, retentions: Sequence[Retention] = KEEP_ALL
) -> list[int]:
    """Swap blocks of each table, for a worker with caches of these shapes; blocks of one table move together."""
    if config.swap_space_gib != AUTO_SWAP_SPACE:
        usable = int(config.swap_space_gib * GIB)
    else:
        usable = 0 if on_cpu else min(SWAP_BYTES, host_available_bytes(Path("/")) // config.workers_here // 4)
    blocks = Kept(shapes, retentions, config.block_size).blocks_in(usable) if shapes else 0
    return [one.num_blocks(blocks) if blocks else 0 for one in retentions]


def _usable(config: WorkerConfig, use: DeviceUse | None, adapters_bytes: int, at_first: int) -> tuple[int, str]:
    """Bytes for the cache if nothing was configured, and how they were determined."""
    kept = (
        f", with {adapters_bytes / GIB:.2f} GiB kept for adapters (max_loras, max_lora_gib)" if adapters_bytes else ""
    )
    if use is None:
        available = host_available_bytes(Path("/"))
        part = max(0, (at_first or available) // config.workers_here - adapters_bytes)
        usable = min(usable_bytes(part), int(SHARE * max(0, available - adapters_bytes)))
        shared = f" to {config.workers_here} workers" if config.workers_here > 1 else ""
        return usable, f"{usable / GIB:.2f} GiB usable of {available / GIB:.2f} GiB available{shared}{kept}"
    usable = max(0, use.for_kv_cache(config.gpu_memory_utilization) - adapters_bytes)
    share = f"{config.gpu_memory_utilization:g} of the GPU's {use.total / GIB:.2f} GiB"
    taken = f"{use.in_use / GIB:.2f} in use, {use.step / GIB:.2f} for a step, {use.graphs / GIB:.2f} for graphs"
    return usable, f"{usable / GIB:.2f} GiB, which is {share} less {taken}{kept}"


def usable_bytes(available: int) -> int:
    """The share of a host's available memory that the cache takes."""
    return int(min(available * SHARE, max(CPU_CAP_BYTES, available / 4)))
