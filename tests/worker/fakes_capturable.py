"""A decoder of real layers whose decode steps a device could record: attention reads lengths from tensors alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.worker.checkpoints.formats.sources import PlainSource
from tests.worker.fakes_spec import spec_of

from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.spec import DecoderSpec, expected_tensors
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.kv_cache import KVCache, KVShape
from pagoda_worker.kernels.ops import AttentionShape, Ops, SlotRoom
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import NO_ADAPTER, TokenSlots

BLOCK, MAX_LEN, VOCAB = 16, 96, 64
BOMB, POISON = 62, 63
WIDTH = MAX_LEN // BLOCK


class QuietCache(KVCache):
    """A cache that reads nothing back from the device."""

    def admit(self, batch: Batch) -> None: ...

    def inspect(self, batch: Batch, hidden: torch.Tensor) -> None: ...


class CapturableOps(AtenOps):
    """Attention of one new token per row that takes lengths and blocks from tensors alone, as on a device."""

    capturable = True

    def plan(self, batch: Batch, kv: KVCache) -> Any:
        return batch

    def lengths(self, batch: Batch) -> torch.Tensor:
        return batch.lengths

    def attend(
        self, query: torch.Tensor, kv: KVCache, layer: int, plan: Any, shape: AttentionShape, sinks: Any = None
    ) -> torch.Tensor:
        if plan.num_tokens != plan.num_rows:
            return super().attend(query, kv, layer, super().plan(plan, kv), shape, sinks)
        tables = plan.block_tables.long()
        tables = torch.nn.functional.pad(tables, (0, WIDTH - tables.shape[1]))
        lines = kv.layers[layer][tables].flatten(1, 2).repeat_interleave(shape.num_heads // shape.num_kv_heads, 3)
        key, value = lines.float().unbind(2)  # [B, WIDTH * BLOCK, Hq, D]
        scores = (query.float()[:, None] * key).sum(-1) * shape.scale
        hidden = torch.arange(WIDTH * BLOCK)[None, :] >= self.lengths(plan)[:, None]
        weights = scores.masked_fill(hidden[..., None], -torch.inf).softmax(1)
        return (weights[..., None] * value).sum(1).flatten(1).to(query.dtype)

    def new_kv_cache(self, shape: KVShape, num_blocks: int, block_size: int) -> KVCache:
        plain = super().new_kv_cache(shape, num_blocks, block_size)
        return QuietCache(shape=shape, num_blocks=num_blocks, block_size=block_size, layers=plain.layers)


def decoder(ops: Ops, dtype: torch.dtype = torch.bfloat16, room: SlotRoom | None = None, **changes: Any) -> Decoder:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "max_positions": MAX_LEN,
        "ropes": (RopeShape(theta=10_000.0, head_dim=8),),
        "rope_of_layer": (0, 0),
        "windows": (None, None),
        "attention_scale": 0.35,
        "tied": True,
    }
    return decoder_of(spec_of(**{**values, **changes}), ops, dtype, room)


def decoder_of(spec: DecoderSpec, ops: Ops, dtype: torch.dtype, room: SlotRoom | None = None) -> Decoder:
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3 if len(shape) > 1 else torch.ones(shape)
        for name, shape in expected_tensors(spec).items()
    }
    source = PlainSource(lambda name: weights[name].to(ops.device, dtype))
    return Decoder(spec, ops, source, dtype, spec.max_positions, room=room)


class HashModel:
    """The logits after a token are a hash of every token up to it, as stored in the cache, and of the slot of its
    adapter; see `fakes_model`.

    A context that contains POISON gives NaN, and a step with BOMB fails unless it is replayed.
    """

    kv_groups = ()
    replacing: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._factors = torch.randint(1, 2**40, (MAX_LEN,), generator=torch.Generator().manual_seed(9)) * 2 + 1

    def plan(self, batch: Batch, kv: Sequence[torch.Tensor]) -> None:
        return None

    def forward(self, batch: Batch, kv: Sequence[torch.Tensor], plan: None = None) -> torch.Tensor:
        (cache,) = kv
        cache.view(-1).index_copy_(0, batch.kv_indices, batch.token_ids)
        cells = cache[batch.block_tables.long()].flatten(1)[:, :MAX_LEN]
        seen = torch.arange(cells.shape[1]) < batch.lengths[:, None]
        sums = torch.where(seen, (cells + 1) * self._factors[: cells.shape[1]], 0).cumsum(1) & (2**61 - 1)
        sums = sums.masked_fill(((cells == POISON) & seen).cumsum(1) > 0, -1)
        if batch.num_tokens == batch.num_rows:
            return sums.gather(1, batch.lengths[:, None].long() - 1)
        if BOMB in batch.token_ids.tolist():
            raise RuntimeError("boom")
        spans = zip(sums, batch.context_lens, batch.query_lens, strict=True)
        return torch.cat([line[end - count : end] for line, end, count in spans])[:, None]

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, slots: TokenSlots | None = None
    ) -> torch.Tensor:
        ids = torch.arange(VOCAB)
        if slots is not None:
            hidden = torch.where(hidden < 0, hidden, hidden + 7 * (slots.there[:, None] - NO_ADAPTER))
        mixed = (hidden % 1_000_003) * 7919 + ids * 104_729 + (hidden % 8191) * (ids * ids % 8191)
        logits = (mixed % 4096).float() / 512
        logits = logits.masked_fill(ids >= BOMB, -30.0).masked_fill(hidden < 0, torch.nan)
        return logits if out is None else out.copy_(logits)
