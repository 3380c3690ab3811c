"""Measures this machine's ceilings: reading memory, and multiplying in registers. See csrc/ceilings.h."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.roofline import Ceilings

PROBE_S = 0.02  # a probe lasts at least this long
FIRST_ROUNDS = 20_000


class CeilingProbe:
    """Measures the ceilings on each call, because those of a shared machine change over time.

    Args:
        buffer_bytes: Size of the buffer that is read; much more than the caches hold.
        repeats: Runs of each probe, of which the median is taken.
    """

    def __init__(self, library: lib.Library, buffer_bytes: int, repeats: int) -> None:
        self._library = library
        self._repeats = repeats
        self._rounds = dict.fromkeys(lib.PEAKS, FIRST_ROUNDS)
        size = max(1, buffer_bytes // lib.READ_BYTES) * lib.READ_BYTES
        self._buffer = lib.pages(size, dtype=torch.int8)
        self._buffer.fill_(1)  # unwritten memory is one shared page of zeros, which would be read from the cache

    def measure(self) -> Ceilings:
        read_s = median_s(lambda: self._library.read(self._buffer), self._repeats)
        return Ceilings(self._buffer.nbytes / read_s, *(self._peak(kind) for kind in lib.PEAKS))

    def _peak(self, kind: str) -> float:
        while seconds(lambda: self._library.multiply(kind, self._rounds[kind])) < PROBE_S:
            self._rounds[kind] *= 2
        rounds = self._rounds[kind]
        operations = self._library.multiply(kind, rounds)
        return operations / median_s(lambda: self._library.multiply(kind, rounds), self._repeats)


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def median_s(run: Callable[[], object], repeats: int) -> float:
    """The median over `repeats` runs, after a warm-up run."""
    run()
    return statistics.median(seconds(run) for _ in range(repeats))
