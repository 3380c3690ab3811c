"""What a step computes of rows that are read: states of all their tokens, and of those at their end what was asked.

Where a model keeps no K and V, its rows lie one behind the other in a cache that holds one layer of one step, and are
given their blocks there as the step begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from pagoda_proto.steps import Chunk, RowOutput
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.kernels.ops import Cache
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.pooling.pooler import Pooler
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.rows import Ints, Row
from pagoda_worker.sampling.sampler import Fault
from pagoda_worker.step.feeding import uploaded
from pagoda_worker.step.pending import OnDevice, OnHost, Work

HOST = torch.device("cpu")


class Reading:
    """Stands where `Compute` stands. It changes rows, and never ends one."""

    def __init__(
        self,
        loaded: LoadedModel,
        pooler: Pooler,
        num_blocks: int,
        config: WorkerConfig,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._loaded, self._pooler, self._accelerator = loaded, pooler, accelerator
        self._block_size = config.block_size
        self._whole = loaded.scratch is not None
        self.kv: tuple[Cache, ...]
        if loaded.scratch is None:
            self.kv = loaded.new_kv_cache(num_blocks, config.block_size)
            self.caches: tuple[tuple[LoadedModel, Sequence[Cache]], ...] = ((loaded, self.kv),)
        else:
            blocks = -(-self.most_tokens(config.max_tokens_per_step) // config.block_size) + config.max_rows
            self.kv = (loaded.ops.new_kv_cache(loaded.scratch, blocks, config.block_size),)
            self.caches = ()

    def most_tokens(self, configured: int) -> int:
        """Tokens of a step: what is read whole must fit into one."""
        return max(configured, self._loaded.max_model_len) if self._whole else configured

    def arranged(self, work: Work) -> Work:
        return work

    def start(self, work: Work, earlier: Sequence[OnDevice] = ()) -> OnHost | None:
        """Compute; None where there is nothing to answer."""
        if not work:
            return None
        if self._whole:
            self._place(work)
        batch = self._paired(build_batch(work, self._block_size, HOST), work)
        batch = batch if self._accelerator is None else uploaded(batch, self._accelerator)
        hidden = self._loaded.model.forward(batch, self.kv)
        for row, chunk in work:
            row.num_computed = chunk.start + chunk.num_tokens
        return OnHost(starts=batch.query_starts, hidden=hidden, logits=None, drafts={}, num_drafted={})

    def _place(self, work: Work) -> None:
        """Give rows blocks one behind the other."""
        first = 0
        for row, chunk in work:
            after = first - -chunk.num_tokens // self._block_size
            row.blocks = Ints(np.arange(first, after))
            first = after

    def _paired(self, batch: Batch, work: Work) -> Batch:
        """The second text of a pair has positions of its own kind, where the model tells them apart."""
        beyond, positions = self._loaded.second_place, batch.positions
        seconds = [(start, row, chunk) for (row, chunk), start in zip(work, batch.query_starts, strict=False)]
        pairs = [(start, row.pooling.second_start, chunk) for start, row, chunk in seconds if row.pooling is not None]
        if not beyond or not any(second for _, second, _ in pairs):
            return batch
        positions = positions.clone()
        for start, second, chunk in pairs:
            if second:
                positions[start + second : start + chunk.num_tokens] += beyond
        return replace(batch, positions=positions)

    def finish(self, launched: OnDevice | OnHost, work: Work) -> dict[int, RowOutput | Fault]:
        """What came of the step, by row id; a row of which there is nothing to say is left out."""
        if not isinstance(launched, OnHost):
            raise TypeError("what is read is read by the host")
        spans = zip(work, launched.starts, strict=False)
        return {
            row.row_id: self._answer(row, chunk, launched.hidden, start)
            for (row, chunk), start in spans
            if chunk.sample
        }

    def _answer(self, row: Row, chunk: Chunk, hidden: torch.Tensor, start: int) -> RowOutput | Fault:
        end = start + chunk.num_tokens
        states = hidden[start if self._pooler.needs_all else end - 1 : end].float().cpu().numpy()
        if row.pooling is None:
            raise TypeError("the row is to be continued")
        found = self._pooler.read(states, row.pooling)
        return found if isinstance(found, Fault) else RowOutput(row.row_id, [], pooled=found)
