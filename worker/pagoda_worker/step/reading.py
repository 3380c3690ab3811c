"""What a step computes for models that read: hidden states of all tokens, and the pooled output of rows at their end.

If a model keeps no K and V, its rows lie one behind the other in a cache that holds one layer of one step; `parts`
assigns their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from pagoda_proto.pooling.params import MAX_SIM
from pagoda_proto.steps import Chunk, RowOutput
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.kernels.ops import Cache
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.pooling.pooler import Pooler
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.rows import Row
from pagoda_worker.sampling.sampler import Fault
from pagoda_worker.step.feeding import uploaded
from pagoda_worker.step.parts import laid_out
from pagoda_worker.step.pending import OnDevice, OnHost, Work

HOST = torch.device("cpu")


def _built(work: Work, block_size: int) -> Batch:
    return build_batch(work, block_size, HOST)


class Reading:
    """The counterpart of `Compute`. It changes rows, and never ends one."""

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
            most_parts = 2 * config.max_rows
            blocks = -(-self.most_tokens(config.max_tokens_per_step) // config.block_size) + most_parts
            self.kv = (loaded.ops.new_kv_cache(loaded.scratch, blocks, config.block_size),)
            self.caches = ()

    def most_tokens(self, configured: int) -> int:
        """Tokens of a step: a prompt that is read whole must fit into one."""
        return max(configured, self._loaded.max_model_len) if self._whole else configured

    def arranged(self, work: Work) -> Work:
        return work

    def start(self, work: Work, earlier: Sequence[OnDevice] = ()) -> OnHost | None:
        """Compute; None if there is nothing to answer."""
        if not work:
            return None
        starts = [0, *accumulate(chunk.num_tokens for _, chunk in work)]
        batch = (laid_out if self._whole else _built)(work, self._block_size)
        batch = self._paired(batch, work, starts)
        batch = batch if self._accelerator is None else uploaded(batch, self._accelerator)
        hidden = self._loaded.model.forward(batch, self.kv)
        for row, chunk in work:
            row.num_computed = chunk.start + chunk.num_tokens
        return OnHost(starts=starts, hidden=hidden, logits=None, drafts={}, num_drafted={})

    def _paired(self, batch: Batch, work: Work, starts: Sequence[int]) -> Batch:
        """Shift the positions of the second text of a pair where the model tells texts apart by position."""
        beyond, positions = self._loaded.second_place, batch.positions
        seconds = [(start, row.pooling, chunk) for (row, chunk), start in zip(work, starts, strict=False)]
        pairs = [
            (start, asked.second_start, chunk)
            for start, asked, chunk in seconds
            if asked is not None and asked.output != MAX_SIM
        ]
        if not beyond or not any(second for _, second, _ in pairs):
            return batch
        positions = positions.clone()
        for start, second, chunk in pairs:
            if second:
                positions[start + second : start + chunk.num_tokens] += beyond
        return replace(batch, positions=positions)

    def finish(self, launched: OnDevice | OnHost, work: Work) -> dict[int, RowOutput | Fault]:
        """The outcome of the step, by row id; rows with nothing to report are left out."""
        if not isinstance(launched, OnHost):
            raise TypeError("pooled results must be on the host")
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
            raise TypeError("the row has no pooling parameters")
        found = self._pooler.read(states, row.pooling, row.tokens.array.tolist())
        return found if isinstance(found, Fault) else RowOutput(row.row_id, [], pooled=found)
