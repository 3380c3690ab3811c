"""`accelerator.Accelerator` by torch.cuda. It decides nothing, because none of it runs without a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pagoda_worker.device.accelerator import Memory

TIMED_ROUNDS, CALLS_PER_ROUND = 3, 5
HEAD_START = 16  # products that keep a device busy for longer than launching a round takes
WARM_UPS = 2  # calls before a recording: a library's first call may allocate, a kernel's first call compiles


class CudaFetch:
    """Waits for its own event and for no later device work."""

    def __init__(self, tensors: Sequence[torch.Tensor], copies: torch.cuda.Stream) -> None:
        self._host = [torch.empty(there.shape, dtype=there.dtype, pin_memory=True) for there in tensors]
        copies.wait_stream(torch.cuda.current_stream(copies.device))
        with torch.cuda.stream(copies):
            for here, there in zip(self._host, tensors, strict=True):
                here.copy_(there, non_blocking=True)
                there.record_stream(copies)  # so that its memory is not reused before the copy is made
            self._arrived = torch.cuda.Event()
            self._arrived.record(copies)

    def done(self) -> bool:
        return bool(self._arrived.query())

    def wait(self) -> Sequence[torch.Tensor]:
        self._arrived.synchronize()
        return self._host


class CudaAccelerator:
    """One device. `torch.cuda.current_stream` carries its work; fetches are copied on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.set_device(device)
        self._copies = torch.cuda.Stream(device)
        self._recording = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # Pageable memory would make the host wait for the device. torch reuses a pinned block once it was copied.
        return host.pin_memory().to(self._device, non_blocking=True)

    def pinned(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, pin_memory=True)

    def fetch(self, *tensors: torch.Tensor) -> CudaFetch:
        return CudaFetch(tensors, self._copies)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def memory(self) -> Memory:
        return Memory(*torch.cuda.mem_get_info(self._device))

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def peak_of(self, run: Callable[[], object]) -> int:
        self.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        self.synchronize()
        return int(torch.cuda.max_memory_reserved(self._device)) - int(before)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self._recording.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._recording):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._recording)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._recording):
            run()
        return graph.replay


def device_seconds(run: Callable[[], object]) -> float:
    """The time of one call of `run` on the current device, without launch overhead: the least of a few rounds."""
    run()
    ahead = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    product, rounds = torch.empty_like(ahead), []
    for _ in range(TIMED_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(HEAD_START):
            torch.mm(ahead, ahead, out=product)
        begin.record()
        for _ in range(CALLS_PER_ROUND):
            run()
        end.record()
        end.synchronize()
        rounds.append(float(begin.elapsed_time(end)) / CALLS_PER_ROUND)
    return min(rounds) / 1000
