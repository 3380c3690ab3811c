"""Decode steps recorded once per batch size and replayed in one call (CUDA graphs).

A recording is a list of device operations at fixed addresses. So a decode step's inputs live in buffers that stay, a
batch is written into them, and rows that a size has and the batch has not are padding: one token that attends to
itself, in a scratch block that no row is ever given. What a step needs that is not in a buffer must be the same for
every step of its size: lengths are read from the device, and the host's lists only bound them.

Prefill and mixed steps, and batches larger than the largest size, run operation by operation.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagoda_worker.accelerator import Accelerator
from pagoda_worker.batch import Batch
from pagoda_worker.kernels.kv_cache import KVShape

log = logging.getLogger(__name__)

LARGEST = 512  # rows from which on launching costs a device nothing
FINE_UP_TO = 256
MIB = 2**20

Progress = Callable[[int, int], None]


def ladder(max_rows: int) -> list[int]:
    """Batch sizes to record, ascending: 1, 2, 4, then every 8th, from 256 on every 16th; the last is `max_rows`."""
    top = min(max_rows, LARGEST)
    sizes = [1, 2, 4, *range(8, FINE_UP_TO, 8), *range(FINE_UP_TO, LARGEST, 16)]
    return [*(size for size in sizes if size < top), top]


def rung(sizes: Sequence[int], batch: Batch) -> int | None:
    """The size to replay for a batch; None when it is to run operation by operation."""
    if batch.num_tokens != batch.num_rows or batch.num_rows > sizes[-1]:
        return None  # some row has more than one new token (none has fewer), or there are too many rows
    return sizes[bisect_left(sizes, batch.num_rows)]


class DecodeBuffers:
    """The inputs of decode steps of up to `max_rows` rows, at addresses that stay.

    Args:
        max_rows: Of the largest recording.
        max_len: Most tokens of a row, which bounds the lengths of a recorded step.
        block_size: Tokens per KV block.
        scratch_block: Where padding rows write; no row's block table has it.
        device: Of the model.
    """

    def __init__(
        self, *, max_rows: int, max_len: int, block_size: int, scratch_block: int, device: torch.device
    ) -> None:
        self._max_len = max_len
        self._padding = (0, 0, scratch_block * block_size, 1, scratch_block)
        wide = torch.empty(3, max_rows, dtype=torch.int64, device=device)
        self._token_ids, self._positions, self._kv_indices = wide.unbind()
        self._lengths = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.empty(max_rows, -(-max_len // block_size), dtype=torch.int32, device=device)
        self._places = torch.arange(max_rows, device=device)
        self._pad(0, max_rows)
        self._num_rows = 0  # rows beyond are padding

    def batch(self, size: int) -> Batch:
        """The first `size` rows as the batch to record: its tensors are the buffers, its lists are bounds."""
        return Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            kv_indices=self._kv_indices[:size],
            block_tables=self._tables[:size],
            query_starts=list(range(size + 1)),
            query_lens=[1] * size,
            context_lens=[self._max_len] * size,
            logit_indices=self._places[:size],
            device_lengths=self._lengths[:size],
        )

    def write(self, batch: Batch) -> None:
        """Make a decode batch the contents; beyond a row's length, its block table keeps what earlier steps left."""
        count, width = batch.block_tables.shape
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        self._kv_indices[:count].copy_(batch.kv_indices)
        self._lengths[:count].copy_(batch.lengths)
        self._tables[:count, :width].copy_(batch.block_tables)
        if count < self._num_rows:
            self._pad(count, self._num_rows)
        self._num_rows = count

    def _pad(self, begin: int, end: int) -> None:
        buffers = (self._token_ids, self._positions, self._kv_indices, self._lengths, self._tables)
        for buffer, value in zip(buffers, self._padding, strict=True):
            buffer[begin:end].fill_(value)


class Plannable(Protocol):
    """What of a decoder is recorded; see `models.decoder.Decoder`."""

    kv_shape: KVShape

    def plan(self, batch: Batch, kv: Any) -> Any: ...

    def forward(self, batch: Batch, kv: Any, plan: Any = None) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Recording:
    """One size: replaying reads the buffers and leaves hidden states [size, H]. `kept` is what it has addresses of."""

    replay: Callable[[], None]
    hidden: torch.Tensor
    kept: object


class Graphed:
    """See `loading.Model`: a decoder whose decode steps over one cache are replayed once `capture` was called."""

    def __init__(
        self, decoder: Plannable, accelerator: Accelerator, sizes: Sequence[int], buffers: DecodeBuffers
    ) -> None:
        self.kv_shape = decoder.kv_shape
        self.logits = decoder.logits
        self._decoder = decoder
        self._accelerator = accelerator
        self._sizes = sizes
        self._buffers = buffers
        self._recordings: dict[int, Recording] = {}
        self._hidden: torch.Tensor | None = None

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        """Hidden states [T, H] of the batch; where replayed, valid until the next call."""
        size = rung(self._sizes, batch)
        recording = self._recordings.get(size) if size is not None else None
        if recording is None:
            return self._decoder.forward(batch, kv)
        self._buffers.write(batch)
        recording.replay()
        return recording.hidden[: batch.num_rows]

    def capture(self, kv: Any, progress: Progress) -> None:
        """Record all sizes over `kv`; `progress` is called with recordings made and recordings in all.

        Raises:
            RuntimeError: the device cannot record the step.
        """
        started, free = time.monotonic(), self._accelerator.memory().free
        for number, _ in enumerate(self.captured(kv), 1):
            progress(number, len(self._sizes))
        taken = (free - self._accelerator.memory().free) / MIB
        took = time.monotonic() - started
        log.info("%d decode graphs of up to %d rows: %.1f s, %.0f MiB", len(self._sizes), self._sizes[-1], took, taken)

    def captured(self, kv: Any) -> Iterator[int]:
        """Record size by size, the largest first, so that the others fit into the memory it leaves; yields bytes taken.

        Raises:
            RuntimeError: the device cannot record the step.
        """
        for size in reversed(self._sizes):
            before = self._accelerator.memory().free
            with torch.inference_mode():
                try:
                    self._recordings[size] = self._record(size, kv)
                except torch.AcceleratorError:
                    raise
                except RuntimeError as error:
                    message = f"a decode step of {size} rows cannot be recorded ({error}); enforce_eager does without"
                    raise RuntimeError(message) from error
            yield before - self._accelerator.memory().free

    def _record(self, size: int, kv: Any) -> Recording:
        batch = self._buffers.batch(size)
        plan = self._decoder.plan(batch, kv)
        if self._hidden is None:  # all sizes leave their result here, so that none keeps memory of its own for it
            self._hidden = torch.empty_like(self._decoder.forward(batch, kv, plan))
        hidden = self._hidden[:size]

        def step() -> None:
            hidden.copy_(self._decoder.forward(batch, kv, plan))

        return Recording(self._accelerator.capture(step), hidden, (batch, plan, kv))


def reserve_for(sizes: Sequence[int], taken: Iterator[int]) -> int:
    """Bytes to keep for recording all `sizes`, from recording the largest two.

    The largest takes the memory that all share; every further one takes at most what the second took on top of it.
    """
    first = next(taken)
    second = next(taken, 0)
    return max(0, first) + max(0, second) * (len(sizes) - 1)
