"""The device as a measurement needs it: how long something takes, and when it is idle. A CPU is one, too.

Everything that only a GPU has is behind `Cuda`; `Host` is its counterpart, so that every section runs anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pagoda_worker.device.accelerator import Accelerator, Memory
from pagoda_worker.device.available import host_available_bytes

Run = Callable[[], object]
LAUNCH_GAP_US = 10.0  # a shorter pause between two operations is theirs; in a longer one the device waits for the host
LEAST_S, ROUNDS = 0.05, 3


class Activity(NamedTuple):
    """What a device did in a while.

    Attributes:
        busy: Share of the time in which something ran, pauses of up to LAUNCH_GAP_US counted in.
        computing: The same without any pause.
        operations: How many things ran: kernels, copies.
    """

    busy: float
    computing: float
    operations: int


class Hardware(Protocol):
    device: torch.device

    def describe(self) -> str: ...

    def accelerator(self) -> Accelerator:
        """A new one, as a worker makes it."""

    def synchronize(self) -> None: ...

    def elapsed_s(self, run: Run, times: int) -> float:
        """Seconds of `times` calls after one another, by the device's own clock."""

    def activity(self, run: Run) -> Activity:
        """Call `run`, watched, which costs some speed."""

    def empty_cache(self) -> None: ...


def seconds(hardware: Hardware, run: Run) -> float:
    """Of one call: the median of rounds that each take LEAST_S or longer."""
    hardware.elapsed_s(run, 1)
    once = max(1e-7, hardware.elapsed_s(run, 1))
    times = max(1, min(1000, int(LEAST_S / once)))
    return sorted(hardware.elapsed_s(run, times) / times for _ in range(ROUNDS))[ROUNDS // 2]


def activity_of(spans: Iterable[tuple[float, float]]) -> Activity:
    """Of what ran from .. to, in microseconds; overlaps count once."""
    ordered = sorted(spans)
    if not ordered:
        return Activity(0.0, 0.0, 0)
    begin = end = ordered[0][0]
    idle = waiting = 0.0
    for start, stop in ordered:
        gap = max(0.0, start - end)
        idle += gap
        waiting += gap if gap > LAUNCH_GAP_US else 0.0
        end = max(end, stop)
    whole = max(end - begin, 1e-9)
    return Activity(1 - waiting / whole, 1 - idle / whole, len(ordered))


def _spans(profile: Any, kind: Any) -> list[tuple[float, float]]:
    """Of what ran on the device; a range that somebody named is no operation."""
    seen = (event for event in profile.events() if event.device_type == kind and not event.is_user_annotation)
    return [(event.time_range.start, event.time_range.end) for event in seen]


class Cuda:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)

    def describe(self) -> str:
        found = torch.cuda.get_device_properties(self.device)
        sizes = f"{found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} SMs"
        return f"{found.name}, {sizes}, capability {found.major}.{found.minor}, CUDA {torch.version.cuda}"

    def accelerator(self) -> Accelerator:
        from pagoda_worker.process.startup import accelerator_of

        return accelerator_of(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def elapsed_s(self, run: Run, times: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        before.record()
        for _ in range(times):
            run()
        after.record()
        self.synchronize()
        return before.elapsed_time(after) / 1000

    def activity(self, run: Run) -> Activity:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            run()
            self.synchronize()
        return activity_of(_spans(watched, DeviceType.CUDA))

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class Host:
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def describe(self) -> str:
        return f"CPU, {torch.get_num_threads()} threads; no figure of it says anything about a GPU"

    def accelerator(self) -> Accelerator:
        return HostAccelerator()

    def synchronize(self) -> None: ...

    def elapsed_s(self, run: Run, times: int) -> float:
        before = time.perf_counter()
        for _ in range(times):
            run()
        return time.perf_counter() - before

    def activity(self, run: Run) -> Activity:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as watched:
            run()
        return activity_of(_spans(watched, DeviceType.CPU))

    def empty_cache(self) -> None: ...


class Fetched(NamedTuple):
    tensors: tuple[torch.Tensor, ...]

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self.tensors


class HostAccelerator:
    """See `accelerator.Accelerator`: the CPU as a device that is always done; its recordings run what they record."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def pinned(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype)

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        return Fetched(tuple(tensor.clone() for tensor in tensors))

    def synchronize(self) -> None: ...

    def memory(self) -> Memory:
        free = host_available_bytes(Path("/"))
        return Memory(free, free)

    def empty_cache(self) -> None: ...

    def peak_of(self, run: Run) -> int:
        run()
        return 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            with torch.inference_mode():
                run()

        return replay


def hardware_of(name: str) -> Hardware:
    return Host() if name == "cpu" else Cuda(torch.device(name if ":" in name else f"{name}:0"))
