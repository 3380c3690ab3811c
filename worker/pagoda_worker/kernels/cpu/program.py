"""A model's step recorded once and then run in a single call: the CPU's counterpart of a CUDA graph.

Recording runs the model's own `forward` on a tape that writes operations down instead of running them, so there is one
description of a model. What changes from step to step (tokens, positions, block tables) reaches the operations through
`lib.Step`; everything else is an address that stays.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from pagoda_worker.kernels.cpu import library as lib
from pagoda_worker.rows.batch import Batch


class Recording:
    """A tape. Its buffers have room for `max_tokens` rows.

    A buffer is used again once the model has let go of the tensor that stood for it: operations run in the order in
    which they were written down, so nothing later reads it.
    """

    def __init__(self, max_tokens: int) -> None:
        self.ops: list[lib.Op] = []
        self.operands: list[object] = []
        self._max_tokens = max_tokens
        self._free: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def buffer(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        free = self._free[width, dtype]
        owner = free.pop() if free else torch.empty(self._max_tokens, width, dtype=dtype)
        self.operands.append(owner)
        handle = owner.view(owner.shape)
        weakref.finalize(handle, free.append, owner).atexit = False
        return handle

    def take(self, op: lib.Op, operands: Sequence[object], **step: object) -> None:
        self.ops.append(op)
        # Buffers are held by their owners; a handle kept here would never be let go of.
        self.operands += [one for one in operands if not isinstance(one, torch.Tensor)]


class Program:
    """What one model computes of a batch over one cache.

    Args:
        library: What runs it.
        plan: What a back end prepares of a batch before attention, as tensors by the names of `lib.Step`.
        tape: What `forward` was recorded on.
        results: The buffers in which its results lie.
        owner: Kept alive as long as the program, because it owns weights and cache.
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
        self._results = results
        self._kept = (tape.operands, owner)
        self._ops = (lib.Op * len(tape.ops))(*tape.ops)

    def run(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Results [T, ..] for the batch; valid until the next run."""
        plan = self._plan(batch)
        step = lib.make_step(
            num_tokens=batch.num_tokens,
            num_rows=batch.num_rows,
            max_blocks=plan["block_tables"].shape[1],
            token_ids=batch.token_ids,
            positions=batch.positions,
            kv_indices=batch.kv_indices,
            **plan,
        )
        self._library.run(self._ops, step)
        return tuple(result[: batch.num_tokens] for result in self._results)


def blank_batch(num_tokens: int) -> Batch:
    """Stands in for the batches to come; only its length is looked at."""
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return Batch(
        token_ids=zeros,
        positions=zeros,
        kv_indices=zeros,
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_starts=[0, num_tokens],
        query_lens=[num_tokens],
        context_lens=[num_tokens],
        logit_indices=zeros[:1],
    )
