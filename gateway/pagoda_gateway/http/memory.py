"""Counts the memory that requests hold before they take it, in all and by client.

Small amounts are not counted: connections are limited, and each can hold at most `COUNTED_ABOVE_BYTES` uncounted.
"""

from __future__ import annotations

import ctypes
from collections import Counter

from pagoda_proto.errors import ErrorCode, PagodaError

COUNTED_ABOVE_BYTES = 64 * 1024
LARGE_BYTES = 128 * 1024  # of a block; also glibc's initial threshold, which it raises when it frees such a block
_M_MMAP_THRESHOLD = -3
_libc = ctypes.CDLL(None)
_malloc_trim = getattr(_libc, "malloc_trim", None)  # glibc's
_mallopt = getattr(_libc, "mallopt", None)


def return_large_blocks() -> None:
    """Have glibc return each large block to the system as it is freed, whatever lies above it. Per process."""
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back_freed() -> None:
    """Return freed memory to the system: glibc keeps memory below a block in use forever. Takes milliseconds, in which
    other threads run."""
    if _malloc_trim is not None:
        _malloc_trim(ctypes.c_size_t(0))


class MemoryBudget:
    """Bytes that may be held at once; one client may have half of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.max_bytes_of_one = max(COUNTED_ABOVE_BYTES, max_bytes // 2)
        self.held_bytes = 0
        self._by_client: Counter[str] = Counter()

    def holding(self, client: str) -> Holding:
        """Return an empty holding; its owner must `release` it in the end."""
        return Holding(self, client)

    def move(self, client: str, num_bytes: int) -> None:
        """Take bytes, or return them with a negative number. Raises PagodaError OVERLOADED; then nothing is taken."""
        if num_bytes > 0:
            own = self._by_client[client] + num_bytes
            if own > self.max_bytes_of_one or self.held_bytes + num_bytes > self._max_bytes:
                message = "the server has no memory left for requests; try again, or send less at once"
                raise PagodaError(ErrorCode.OVERLOADED, message, retry_after_s=1.0)
        self.held_bytes += num_bytes
        self._by_client[client] += num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


class Holding:
    """One request's share. Only the event loop touches it."""

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Raises PagodaError OVERLOADED if that is more than is left, REQUEST_TOO_LARGE if it always will be."""
        if num_bytes > self._budget.max_bytes_of_one:
            raise PagodaError(ErrorCode.REQUEST_TOO_LARGE, "the request takes more memory than one client may use here")
        if num_bytes > max(COUNTED_ABOVE_BYTES, self._num_bytes):
            self._budget.move(self._client, num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def release(self) -> None:
        """Safe to call twice."""
        if self._num_bytes:
            self._budget.move(self._client, -self._num_bytes)
            self._num_bytes = 0
