"""A model's step recorded once and then run in a single call: the CPU's counterpart of a CUDA graph.

Recording runs the model's own `forward` on a tape that records operations instead of running them, so a model is
described only once. What changes from step to step (tokens, positions, block tables) reaches the operations through
`lib.Step`; everything else is a fixed address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch

from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.kernels.cpu.operations import Operation, joins, program_of
from pagoda_worker.rows.batch import Batch


class Immediate:
    """Runs each operation immediately. Its steps hold only the tables of the operation's own group."""

    all_tables = False

    def __init__(self, library: lib.Library) -> None:
        self._library = library

    def buffer(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype)

    def take(self, operation: Operation, **step: object) -> None:
        self._library.run(program_of([[operation]]), lib.make_step(**step))


class Recording:
    """A tape. Its buffers, of `max_tokens` rows, get memory only in `laid_out`, which knows how long each is needed.

    Attributes:
        stages: The recorded operations in order; those of a stage may be fused.
    """

    all_tables = True

    def __init__(self, max_tokens: int) -> None:
        self.stages: list[list[Operation]] = []
        self._max_tokens = max_tokens
        self._buffers: dict[int, torch.Tensor] = {}  # by their storage

    def buffer(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(self._max_tokens, width, dtype=dtype, device="meta")
        self._buffers[_storage(buffer)] = buffer
        return buffer

    def take(self, operation: Operation, **step: object) -> None:
        if self.stages and joins(self.stages[-1][-1], operation):
            self.stages[-1].append(operation)
        else:
            self.stages.append([operation])

    def laid_out(self, results: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The memory of every buffer, by its storage.

        Stages run in recorded order, so a buffer's memory can be reused after the last stage that names it; the memory
        of `results` is never reused.
        """
        named = [
            {_storage(one) for operation in stage for one in operation if _is_buffer(one)} for stage in self.stages
        ]
        last = {storage: index for index, storages in enumerate(named) for storage in storages}
        last |= dict.fromkeys(map(_storage, results), len(named))
        memory: dict[int, torch.Tensor] = {}
        free: defaultdict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for index, storages in enumerate(named):
            for storage in storages - memory.keys():
                buffer = self._buffers[storage]
                unused = free[buffer.shape, buffer.dtype]
                # Not `empty_like`: for meta tensors it is implemented in Python and imports sympy.
                memory[storage] = unused.pop() if unused else torch.empty(buffer.shape, dtype=buffer.dtype)
            for storage in storages:
                if last[storage] == index:
                    free[memory[storage].shape, memory[storage].dtype].append(memory[storage])
        return memory


def _storage(tensor: torch.Tensor) -> int:
    """The same for a buffer and its views."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _address(view: torch.Tensor, memory: Mapping[int, torch.Tensor]) -> int:
    """Of a buffer, or of a view of it."""
    return memory[_storage(view)].data_ptr() + int(view.storage_offset()) * view.element_size()


def _is_buffer(operand: object) -> TypeGuard[torch.Tensor]:
    return isinstance(operand, torch.Tensor) and operand.is_meta


class Program:
    """One model's forward pass over one cache.

    Args:
        library: Runs the program.
        plan: Prepares a batch for all groups; returns tensors by field of `lib.Step`.
        tape: On which `forward` was recorded.
        results: What `forward` returned.
        owner: Kept alive with the program, because it owns the weights and the cache.
    """

    def __init__(
        self,
        library: lib.Library,
        plan: Callable[[Batch], dict[str, torch.Tensor]],
        tape: Recording,
        results: Sequence[torch.Tensor],
        owner: object,
    ) -> None:
        self._library = library
        self._plan = plan
        memory = tape.laid_out(results)
        self._results = [memory[_storage(result)] for result in results]
        self._batch: Batch | None = None  # the last, and what was made of it: `_step` has the tensors' addresses
        self._planned: dict[str, torch.Tensor] = {}
        self._step, self._shown = lib.Step(), tuple(self._results)
        self._kept = (tape.stages, memory, owner)
        self._ops = program_of(tape.stages, lambda one: _address(one, memory) if _is_buffer(one) else one.data_ptr())

    def run(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Results [T, ..] for the batch; valid until the next run."""
        if batch is not self._batch or batch.others:  # a plan for several tables copies them
            self._prepare(batch)
        self._library.run(self._ops, self._step)
        return self._shown

    def _prepare(self, batch: Batch) -> None:
        """Point to the tensors of a batch, which may be renewed in place: see `Layouts`."""
        self._planned = plan = self._plan(batch)
        self._step = lib.make_step(
            num_tokens=batch.num_tokens,
            num_rows=batch.num_rows,
            max_blocks=plan["block_tables"].shape[-1],
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=None if batch.slots is None else batch.slots.tensor,
            **plan,
        )
        if self._batch is None or self._batch.num_tokens != batch.num_tokens:
            self._shown = tuple(result[: batch.num_tokens] for result in self._results)
        self._batch = batch
