"""Shared by the tests of the Triton kernels: where they run, and how close to float64 they must come."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.worker.checkpoints.formats.sources import PlainSource
from tests.worker.models.harness import make_batch

from pagoda_worker.checkpoints.spec import DecoderSpec, expected_tensors
from pagoda_worker.kernels.ops import AttentionShape, Ops
from pagoda_worker.kernels.reference import ReferenceOps
from pagoda_worker.kernels.triton.ops import TritonOps, interpreted
from pagoda_worker.kernels.triton.plan import Tiles
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.rows.batch import Batch

CPU = torch.device("cpu")
DEVICE = torch.device("cpu" if interpreted() else "cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

reference = ReferenceOps(CPU)
walking = TritonOps(DEVICE, Tiles(low=16, high=64, fill=0))
splitting = TritonOps(DEVICE, Tiles(low=16, high=64, fill=10**6))


def batch_of(rows: list[tuple[int, int, list[int]]], block_size: int) -> Batch:
    """Rows of (new tokens, context length, block ids)."""
    return make_batch([([0] * new, context - new, blocks) for new, context, blocks in rows], block_size)


def moved(batch: Batch) -> Batch:
    names = ("token_ids", "positions", "kv_indices", "block_tables", "logit_indices")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


def shape_of(heads: int, kv_heads: int, head_dim: int, **changes: float | None) -> AttentionShape:
    scale = head_dim**-0.5
    return AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=scale, **changes)  # type: ignore[arg-type]


def greedy(spec: DecoderSpec, ops: Ops, weights: dict[str, torch.Tensor], prompts: list[list[int]]) -> list[list[int]]:
    """Six greedy tokens per prompt: prompts are prefilled in two chunks, then decoded, with all rows in every batch."""
    model = Decoder(
        spec, ops, PlainSource(lambda name: weights[name].to(ops.device)), torch.float32, spec.max_positions
    )
    kv = [ops.new_kv_cache(group, 64, 16) for group in model.kv_groups]
    blocks = torch.randperm(64, generator=torch.Generator().manual_seed(2)).view(-1, 8)
    rows = [(list(prompt), blocks[i].tolist()) for i, prompt in enumerate(prompts)]

    def step(spans: list[tuple[int, int]]) -> list[int]:
        batch = batch_of([(end - start, end, table) for (start, end), (_, table) in zip(spans, rows, strict=True)], 16)
        ids = torch.tensor([t for (a, b), (tokens, _) in zip(spans, rows, strict=True) for t in tokens[a:b]])
        batch = replace(batch, token_ids=ids)
        there: Batch = moved(batch) if ops.device == DEVICE else batch
        hidden = model.forward(there, kv)
        best: list[int] = model.logits(hidden[there.logit_indices]).argmax(-1).tolist()
        return best

    step([(0, len(tokens) // 2) for tokens, _ in rows])
    spans = [(len(tokens) // 2, len(tokens)) for tokens, _ in rows]
    for _ in range(6):
        for (tokens, _), token in zip(rows, step(spans), strict=True):
            tokens.append(token)
        spans = [(len(tokens) - 1, len(tokens)) for tokens, _ in rows]
    return [tokens[-6:] for tokens, _ in rows]


def assert_continues(spec: DecoderSpec, ops: Ops) -> None:
    """A small model with random weights generates the same tokens as with the reference back end."""
    generator = torch.Generator().manual_seed(4)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in expected_tensors(spec).items()
    }
    prompts = [torch.randint(0, 211, (n,), generator=generator).tolist() for n in (2, 33, 16)]
    expected = greedy(spec, reference, weights, prompts)
    assert greedy(spec, ops, weights, prompts) == expected
    assert len({token for row in expected for token in row}) > 3
