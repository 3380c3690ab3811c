"""Runs text work in bounded pieces on a few threads; clients take turns, so no client waits for another's backlog.

Parsing, rendering, tokenising and their inverses run here unless they are shorter than waking a thread. The event loop
owns all state; threads only run pieces. A piece whose client is gone is dropped before it starts; a running one is
short, because its submitter bounds it. Large pieces leave one thread to the small ones.

A thread that holds the GIL blocks the event loop until it gets a CPU. So only work that releases the GIL runs at a
lower priority where CPUs are short.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pagoda_gateway.http.memory import give_back_freed
from pagoda_proto.errors import ErrorCode, PagodaError

INLINE_SIZE = 4096  # characters, bytes or token ids; less takes less time than waking a thread
LARGE_SIZE = 128 * 1024
NICENESS = 10  # added to that of the pool's creator

T = TypeVar("T")


@dataclass(eq=False)
class Piece:
    """`size` is what the work is proportional to. A `native` piece computes without the GIL."""

    client: str
    size: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    native: bool = False

    @property
    def large(self) -> bool:
        return self.size > LARGE_SIZE


@dataclass
class _Line:
    """One client's waiting pieces."""

    small: deque[Piece] = field(default_factory=deque)
    large: deque[Piece] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.small) + len(self.large)

    def of(self, piece: Piece) -> deque[Piece]:
        return self.large if piece.large else self.small


class FairQueue:
    """FIFO within a client, round-robin between clients. Pure state, bounded in all and by client."""

    def __init__(self, max_waiting: int, max_waiting_per_client: int) -> None:
        self._max_waiting = max_waiting
        self._max_per_client = max_waiting_per_client
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # in turn order; none is empty
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, piece: Piece) -> None:
        """Raises PagodaError OVERLOADED."""
        line = self._lines.get(piece.client, _Line())
        if self._num_waiting >= self._max_waiting or len(line) >= self._max_per_client:
            message = "too many texts are waiting to be read; try again"
            raise PagodaError(ErrorCode.OVERLOADED, message, retry_after_s=1.0)
        line.of(piece).append(piece)
        self._lines[piece.client] = line
        self._num_waiting += 1

    def remove(self, piece: Piece) -> None:
        """Remove a piece if it is waiting."""
        line = self._lines.get(piece.client)
        if line is not None and piece in line.of(piece):
            line.of(piece).remove(piece)
            self._leave(piece.client, line)

    def next(self, *, large: bool) -> Piece | None:
        """Take the piece whose turn it is; without `large`, the first small one."""
        for client, line in self._lines.items():
            pieces = line.small or (line.large if large else line.small)
            if pieces:
                piece = pieces.popleft()
                self._lines.move_to_end(client)
                self._leave(client, line)
                return piece
        return None

    def _leave(self, client: str, line: _Line) -> None:
        self._num_waiting -= 1
        if not line:
            del self._lines[client]


def _yield_to_others() -> None:
    """Let streams run before the tokenising of long texts where CPUs are short. Linux has priorities per thread; a
    sandbox may forbid setting them, and then all are equal."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


class TextPool:
    """A few threads behind a `FairQueue`. Used from one event loop."""

    def __init__(self, num_threads: int, queue: FairQueue) -> None:
        self._queue = queue
        self._num_threads = num_threads
        self._most_large = max(1, num_threads - 1)
        self._num_running = 0
        self._num_large = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._yielding = ThreadPoolExecutor(num_threads, thread_name_prefix="native", initializer=_yield_to_others)

    async def run(self, client: str, size: int, work: Callable[[], T], *, native: bool = False) -> T:
        """Return the result of `work`, which is `native` if it spends its time without the GIL. Cancelling removes a
        waiting piece from the queue.

        Raises:
            PagodaError: OVERLOADED if too much is waiting; or whatever `work` raises.
        """
        if size <= INLINE_SIZE:
            return work()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        piece = Piece(client, size, work, result, native)
        self._queue.add(piece)
        self._begin()
        try:
            return await result
        finally:
            self._queue.remove(piece)

    def close(self) -> None:
        """Drop waiting pieces; do not wait for running ones."""
        self._closed = True
        for threads in (self._threads, self._yielding):
            threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._num_running < self._num_threads:
            piece = self._queue.next(large=self._num_large < self._most_large)
            if piece is None:
                return
            self._num_running += 1
            self._num_large += piece.large
            done = asyncio.wrap_future((self._yielding if piece.native else self._threads).submit(piece.work))
            done.add_done_callback(partial(self._end, piece))

    def _end(self, piece: Piece, done: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        error = None if done.cancelled() else done.exception()
        if not piece.result.done():
            if done.cancelled():
                piece.result.cancel()
            elif error is not None:
                piece.result.set_exception(error)
            else:
                piece.result.set_result(done.result())
        if self._closed:
            return
        if piece.large:
            # Not on a low-priority thread, as the allocator is locked meanwhile. The next large piece starts after it.
            asyncio.wrap_future(self._threads.submit(give_back_freed)).add_done_callback(self._end_large)
        self._begin()

    def _end_large(self, _: asyncio.Future[None]) -> None:
        self._num_large -= 1
        if not self._closed:
            self._begin()
