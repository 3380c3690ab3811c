"""The memory a model needs on a GPU besides its KV cache, measured by running the largest steps over a one-block cache.

Where K and V lie changes no allocation, so every block table repeats that one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk, NewRow
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.kernels.ops import guarded
from pagoda_worker.loading.memory import DeviceUse, NotEnoughMemory
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.rows.batch import Batch, Places, build_batch
from pagoda_worker.rows.rows import Row
from pagoda_worker.rows.slots import slots_of
from pagoda_worker.sampling.device_sampler import DeviceSampler
from pagoda_worker.speculation.drafting import MAX_DRAFTS
from pagoda_worker.step.feeding import uploaded

# Exceed a high tile of rows, and a low one; exceed one split of keys, and fit one; many rows for experts, and few.
PROMPT_TOKENS = (300, 150, 1)
PARAMS = SamplingParams(temperature=1.0, logprobs=1)  # sampling for any other row takes no more memory


@dataclass(frozen=True)
class Rehearsal:
    """Models that take turns on one device, run before they serve. The `sampler` has its tables already."""

    models: Sequence[LoadedModel]
    config: WorkerConfig
    accelerator: Accelerator
    sampler: DeviceSampler

    def device_use(self, graphs: Callable[[], int]) -> DeviceUse:
        """Measure them; `graphs` returns the bytes that recorded steps will take (0 for none).

        Raises:
            NotEnoughMemory: the largest step does not fit even without a cache.
            BackendError: the kernels fail on it.
        """
        config = self.config
        try:
            step = self.accelerator.peak_of(partial(self._run, largest_steps, torch.OutOfMemoryError))
        except torch.OutOfMemoryError as error:
            size = f"max_tokens_per_step={config.max_tokens_per_step} tokens and max_rows={config.max_rows} rows"
            raise NotEnoughMemory(f"a step of {size} does not fit beside the weights: lower one of them") from error
        recorded = graphs()
        self.accelerator.synchronize()
        self.accelerator.empty_cache()
        free, total = self.accelerator.memory()
        return DeviceUse(total=total, in_use=total - free, step=step, graphs=recorded)

    def warm_up(self) -> None:
        """Run a prompt beside a decode, so that no request waits for kernels to compile.

        Raises:
            BackendError: the kernels fail on it.
        """
        self._run(mixed_steps)

    def _run(self, steps: Callable[[WorkerConfig, int], Iterator[Batch]], *but: type[Exception]) -> None:
        """Run the `steps` of every model. Raises BackendError, and exceptions of `but` as they are."""
        for loaded in self.models:
            compute = partial(self._compute, loaded, steps(self.config, loaded.max_model_len))
            guarded(loaded.ops.name, compute, but=(torch.AcceleratorError, *but))

    def _compute(self, loaded: LoadedModel, batches: Iterable[Batch]) -> None:
        kv = loaded.new_kv_cache(1, self.config.block_size)
        for batch in batches:
            with torch.inference_mode():
                others = (Places(batch.kv_indices, batch.block_tables),) * (len(loaded.retentions) - 1)
                asked = adapted(batch) if loaded.adapters.count else batch
                there = uploaded(replace(asked, others=others), self.accelerator)
                hidden = loaded.model.forward(there, kv)
                slots = {} if there.logit_slots is None else {"slots": there.logit_slots}
                logits = loaded.model.logits(hidden[there.logit_indices], **slots)
                rows = [_row(i, 1, self.config.block_size) for i in range(batch.num_rows)]
                if self.sampler.takes(rows):
                    self.sampler.sample(logits[: len(rows)], rows)


def adapted(batch: Batch) -> Batch:
    """`batch` with an adapter for every token: adapters need memory and kernels of their own."""
    slots = [slots_of(0, count, torch.device("cpu")) for count in (batch.num_tokens, len(batch.logit_indices))]
    return replace(batch, slots=slots[0], logit_slots=slots[1])


def mixed_steps(config: WorkerConfig, max_model_len: int) -> Iterator[Batch]:
    """A long prompt, a short one and one of a single token, each beside a decode where two rows are allowed."""
    for tokens in PROMPT_TOKENS:
        sizes = [min(tokens, config.max_tokens_per_step, max_model_len), 1][: config.max_rows]
        work = [(_row(i, size, config.block_size), Chunk(i, 0, size, True)) for i, size in enumerate(sizes)]
        yield build_batch(work, config.block_size, torch.device("cpu"), {})


def largest_steps(config: WorkerConfig, max_model_len: int) -> Iterator[Batch]:
    """Steps of the most tokens allowed: with the most rows allowed, and with the fewest that can hold them.

    Logits are wanted for one token of a row and for as many more as there may be drafts.
    """
    max_drafts = (config.max_drafts or MAX_DRAFTS) if config.speculation else 0
    tokens = min(config.max_tokens_per_step, config.max_rows * max_model_len)
    most = min(config.max_rows, tokens)
    fewest = -(-tokens // max_model_len)
    for num_rows in dict.fromkeys((most, fewest)):
        sizes = [tokens // num_rows + (i < tokens % num_rows) for i in range(num_rows)]
        counts = [min(max_drafts, size - 1) for size in sizes]
        work = [
            (_row(i, size, config.block_size), Chunk(i, 0, size - count, True))
            for i, (size, count) in enumerate(zip(sizes, counts, strict=True))
        ]
        drafts = {i: np.zeros(count, np.int64) for i, count in enumerate(counts) if count}
        yield build_batch(work, config.block_size, torch.device("cpu"), drafts)


def _row(row_id: int, num_tokens: int, block_size: int) -> Row:
    tokens, blocks = np.zeros(num_tokens, np.int64), np.zeros(-(-num_tokens // block_size), np.int64)
    new = NewRow(
        row_id=row_id, token_ids=[0], num_prompt_tokens=num_tokens, num_computed=0, block_ids=[0], params=PARAMS, seed=0
    )
    return Row.of(new, tokens, blocks)
