"""A model small enough to check by hand: the logits after a token are a hash of every token up to it.

The cache holds token ids instead of K and V, and the hash is computed from the cache. A wrong block, a missed copy or a
chunk computed twice therefore changes the output tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import AppendBlocks, Chunk, NewRow, StepPlan, StepResult
from pagoda_worker.adapters.store import NO_ADAPTERS, Adapters
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.grammars.compiling import NO_GRAMMARS, Grammars
from pagoda_worker.kernels.kv_cache import Blocks, KVShape
from pagoda_worker.loading.retention import KEEP_ALL, Retention
from pagoda_worker.rows.batch import Batch
from pagoda_worker.sampling import logprobs, sampler
from pagoda_worker.sampling.device_sampler import DeviceSampler
from pagoda_worker.step.runner import ModelRunner

VOCAB = 512
POISON = 500  # a context with this token has NaN logits
BOMB = 501  # a batch with this token makes the forward pass raise
HUGE = 503  # a batch with this token takes more memory than there is
GONE = 504  # a batch with this token loses the device
INFINITE = 502  # a context with this token has an infinite logit
BLOCK_SIZE = 16
NUM_BLOCKS = 64
MAX_MODEL_LEN = 256
KV_SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.int64)
_MASK = 2**61 - 1


class FakeOps:
    def copy_blocks(self, kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        source, target = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
        kv[target] = kv[source].clone()

    def export_blocks(self, kv: torch.Tensor, block_ids: list[int]) -> Blocks:
        return Blocks(cells=kv[block_ids][:, None, None, None, :, None].expand(-1, 2, -1, -1, -1, -1), scales=None)

    def import_blocks(self, kv: torch.Tensor, block_ids: list[int], blocks: Blocks) -> None:
        kv[block_ids] = blocks.cells[:, 0, 0, 0, :, 0]

    sample = staticmethod(sampler.sample)
    report = staticmethod(logprobs.report)


@dataclass
class FakeModel:
    gate: threading.Event | None = None  # if given, a forward pass waits for it
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] = field(default_factory=list)

    def forward(self, batch: Batch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        (cache,) = kv
        self.batches.append(batch)
        self.entered.set()
        if self.gate is not None and not self.gate.wait(30):
            raise RuntimeError("nobody opened the gate")
        if BOMB in batch.token_ids.tolist():
            raise RuntimeError("boom")
        if HUGE in batch.token_ids.tolist():
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        if GONE in batch.token_ids.tolist():
            raise torch.AcceleratorError("unspecified launch failure")
        cache.view(-1)[batch.kv_indices] = batch.token_ids
        hidden = []
        for i in range(batch.num_rows):
            length = batch.context_lens[i]
            context = cache[batch.block_tables[i].long()].view(-1)[:length].tolist()
            states, state = [], 7
            for token in context:
                if token in (POISON, INFINITE):
                    state = -token
                elif state >= 0:
                    state = (state * 1_000_003 + token + 1) & _MASK
                states.append(state)
            hidden += states[length - batch.query_lens[i] :]
        return torch.tensor(hidden, dtype=torch.int64)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(VOCAB)
        mixed = (hidden % 1_000_003) * 7919 + ids * 104_729 + (hidden % 8191) * (ids * ids % 8191)
        logits = (mixed % 4096).float() / 512
        logits[:, POISON:] = -30.0  # special tokens appear only where a test puts them
        logits[hidden[:, 0] < 0, 3] = torch.inf
        logits[hidden[:, 0] == -POISON, 3] = torch.nan
        return logits


@dataclass
class FakeLoaded:
    model: FakeModel = field(default_factory=FakeModel)
    ops: FakeOps = field(default_factory=FakeOps)
    kv_groups: tuple[KVShape, ...] = (KV_SHAPE,)
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vocab_size: int = VOCAB
    max_model_len: int = MAX_MODEL_LEN
    fingerprint: str = "fake"
    numerics_id: str = "fake-numerics"
    grammars: Grammars = NO_GRAMMARS
    adapters: Adapters = NO_ADAPTERS
    pooler: None = None
    spare_blocks: int = 0
    retentions: tuple[Retention, ...] = KEEP_ALL

    def new_kv_cache(self, num_blocks: int, block_size: int) -> tuple[torch.Tensor]:
        return (torch.full((num_blocks, block_size), -1, dtype=torch.int64),)


def fake_runner(
    model: FakeModel | None = None,
    accelerator: Accelerator | None = None,
    sampler: DeviceSampler | None = None,
    **changes: float,
) -> ModelRunner:
    config, loaded = WorkerConfig(block_size=BLOCK_SIZE, **changes), FakeLoaded(model or FakeModel())
    return ModelRunner(loaded, NUM_BLOCKS, config, accelerator=accelerator, sampler=sampler)  # type: ignore[arg-type]


GREEDY = SamplingParams(temperature=0.0)


def new_row(row_id: int, token_ids: list[int], blocks: list[int], **changes: object) -> NewRow:
    values: dict[str, object] = {
        "row_id": row_id,
        "token_ids": token_ids,
        "num_prompt_tokens": len(token_ids),
        "num_computed": 0,
        "block_ids": blocks,
        "params": GREEDY,
        "seed": 11,
    }
    return NewRow(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Driver:
    """Plans for a runner as an engine core would, with blocks allocated in order and never reused."""

    runner: ModelRunner
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    step: int = 0
    block_size: int = BLOCK_SIZE
    known: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def add(self, row_id: int, token_ids: list[int], **changes: object) -> NewRow:
        blocks = self.take(len(token_ids))
        self.known[row_id], self.computed[row_id], self.held[row_id] = len(token_ids), 0, len(blocks)
        return new_row(row_id, token_ids, blocks, **changes)

    def take(self, tokens: int) -> list[int]:
        count = -(-tokens // self.block_size)
        return [self.free.pop(0) for _ in range(count)]

    def run(self, new: list[NewRow], chunk_tokens: int = 10**6) -> StepResult:
        return self.runner.execute(self.plan(new, chunk_tokens))

    def plan(self, new: list[NewRow], chunk_tokens: int = 10**6) -> StepPlan:
        """One step in which every row computes up to `chunk_tokens` tokens."""
        chunks, append = [], []
        for row_id, known in self.known.items():
            start = self.computed[row_id]
            count = min(chunk_tokens, known - start)
            missing = -(-(start + count) // self.block_size) - self.held[row_id]
            if missing > 0:
                append.append(AppendBlocks(row_id, [self.free.pop(0) for _ in range(missing)]))
                self.held[row_id] += missing
            sample = start + count == known
            chunks.append(Chunk(row_id, start, count, sample))
            self.computed[row_id] += count
            self.known[row_id] += sample
        self.step += 1
        return StepPlan(step=self.step, new_rows=new, append_blocks=append, chunks=chunks)

    def finish(self, row_id: int) -> None:
        for held in (self.known, self.computed, self.held):
            del held[row_id]
