"""Decode steps recorded once per batch size and replayed in one call (CUDA graphs).

A recording is a list of device operations at fixed addresses. So a decode step reads the first of the `Lines` that stay
on the device; those beyond the step's rows are padding: one token that attends to itself, in a scratch block that is
never allocated to a row. Everything that is not in a line must be the same for every step of a size: the device reads
lengths from the lines, and the host's lists only bound them.

Where rows may have adapters, each size is recorded twice, so that steps without adapters pay nothing for them; a line
holds its row's slot. Prefill and mixed steps, batches beyond the largest size, and steps with an adapter that replaces
the model's own weights run operation by operation.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import BackendError, guarded
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots
from pagoda_worker.step.lines import Lines
from pagoda_worker.step.pending import OnDevice, Work

log = logging.getLogger(__name__)

LARGEST = 512  # from this many rows on, launch overhead is hidden
FINE_UP_TO = 256
MIB = 2**20

Progress = Callable[[int, int], None]


def ladder(max_rows: int) -> list[int]:
    """Batch sizes to record, ascending: 1, 2, 4, then every 8th, from 256 on every 16th; the last is `max_rows`."""
    top = min(max_rows, LARGEST)
    sizes = [1, 2, 4, *range(8, FINE_UP_TO, 8), *range(FINE_UP_TO, LARGEST, 16)]
    return [*(size for size in sizes if size < top), top]


def rung(sizes: Sequence[int], work: Work) -> int | None:
    """The size to replay for a step; None if the step must run operation by operation."""
    if len(work) > sizes[-1] or not all(chunk.num_tokens == 1 and chunk.sample for _, chunk in work):
        return None
    return sizes[bisect_left(sizes, len(work))]


class Computed(NamedTuple):
    """A forward pass.

    Attributes:
        batch: What was computed; for a replay, upper bounds of it.
        hidden: [T, H]; for a replay, `hidden` and `logits` are valid until the next step.
        logits: [R, V] float32, None where none are wanted.
        advance: Takes the ids [R] that the device chose from `logits`, for its next step.
    """

    batch: Batch
    hidden: torch.Tensor
    logits: torch.Tensor | None
    advance: Callable[[torch.Tensor], None] = lambda ids: None


class Plannable(Protocol):
    """The recorded part of a decoder; see `models.decoder.Decoder`."""

    kv_groups: tuple[KVShape, ...]
    replacing: frozenset[int]

    def plan(self, batch: Batch, kv: Any) -> Any: ...

    def forward(self, batch: Batch, kv: Any, plan: Any = None) -> torch.Tensor: ...

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, slots: TokenSlots | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Recording:
    """One size: replaying it reads the lines of `batch`. `kept` keeps alive what else it has addresses of."""

    replay: Callable[[], None]
    batch: Batch
    kept: object


class Graphed:
    """See `loading.model.Model`: a decoder whose decode steps over one cache are replayed after `capture`."""

    def __init__(
        self, decoder: Plannable, accelerator: Accelerator, sizes: Sequence[int], lines: Lines, adapted: bool = False
    ) -> None:
        """`adapted`: rows may have adapters."""
        self.kv_groups = decoder.kv_groups
        self.forward = decoder.forward
        self.logits = decoder.logits
        self.arranged = lines.arranged
        self.nbytes = lines.nbytes  # excludes what `captured` takes
        self._decoder = decoder
        self._accelerator = accelerator
        self._sizes = sizes
        self._lines = lines
        self._wanted = [(size, kind) for kind in ((True, False) if adapted else (False,)) for size in reversed(sizes)]
        self._recordings: dict[tuple[int, bool], Recording] = {}  # by size, and whether rows have adapters
        self._results: tuple[torch.Tensor, torch.Tensor] | None = None

    def replayed(self, work: Work, earlier: Sequence[OnDevice]) -> Computed | None:
        """The step, if it can be replayed; fastest if `work` is in the order of `arranged`.

        `earlier` steps have tokens of these rows that the host does not know yet.
        """
        size = rung(self._sizes, work)
        adapters = {row.slot for row, _ in work} - {NO_ADAPTER}
        if size is None or self._results is None or (adapters and not adapters.isdisjoint(self._decoder.replacing)):
            return None
        recording = self._recordings.get((size, bool(adapters)))
        if recording is None:
            return None
        self._lines.write(work, size, earlier, self._accelerator)
        recording.replay()
        hidden, logits = (result[: len(work)] for result in self._results)
        return Computed(recording.batch, hidden, logits, self._lines.advance)

    @property
    def num_recordings(self) -> int:
        """Once all are made."""
        return len(self._wanted)

    def capture(self, kv: Any, progress: Progress) -> None:
        """Record all sizes over `kv`; `progress` is called with recordings made and recordings in all.

        Raises:
            BackendError: the device cannot record the step.
        """
        started, free = time.monotonic(), self._accelerator.memory().free
        for number, _ in enumerate(self.captured(kv), 1):
            progress(number, len(self._wanted))
        taken = (free - self._accelerator.memory().free) / MIB
        took = time.monotonic() - started
        log.info("%d decode graphs of up to %d rows: %.1f s, %.0f MiB", len(self._wanted), self._sizes[-1], took, taken)

    def captured(self, kv: Any) -> Iterator[int]:
        """Record size by size; yields bytes taken.

        The largest comes first, so that the others fit into the memory it leaves, and those with adapters before all
        others.

        Raises:
            BackendError: the device cannot record the step.
        """
        for size, adapted in self._wanted:
            self._accelerator.empty_cache()  # cached memory that allocations can reuse counts as free
            before = self._accelerator.memory().free
            with torch.inference_mode():
                try:
                    record = partial(self._record, size, adapted, kv)
                    self._recordings[size, adapted] = guarded("recording", record, but=(torch.AcceleratorError,))
                except BackendError as error:
                    message = (
                        f"a decode step of {size} rows cannot be recorded ({error}); set enforce_eager to do without"
                    )
                    raise BackendError(message) from error
            yield before - self._accelerator.memory().free

    def _record(self, size: int, adapted: bool, kv: Any) -> Recording:
        batch = self._lines.batch(size, adapted)
        plan = self._decoder.plan(batch, kv)
        if self._results is None:  # shared by all sizes, so that none allocates its own
            hidden = self._decoder.forward(batch, kv, plan)
            self._results = torch.empty_like(hidden), torch.empty_like(self._decoder.logits(hidden))
        hidden, logits = (result[:size] for result in self._results)

        def step() -> None:
            self._lines.lay_out(size)
            hidden.copy_(self._decoder.forward(batch, kv, plan))
            self._decoder.logits(hidden, logits, batch.logit_slots)

        return Recording(self._accelerator.capture(step), batch, (plan, kv))


def reserve_for(count: int, taken: Iterator[int]) -> int:
    """Bytes to reserve for `count` recordings, from making the first two.

    The largest takes the memory that all share; each further one takes at most what the second took on top of it.
    """
    first = next(taken)
    second = next(taken, 0)
    return max(0, first) + max(0, second) * (count - 1)
