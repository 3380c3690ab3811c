"""Tries attention on this device with a model's shapes: whether it is batch-invariant (see `ops`), and how fast it is.

The back ends compared share a cache, and one of them has already passed its own check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_worker.kernels.kv_cache import KVShape, planes_of
from pagoda_worker.kernels.ops import AttentionShape, Needs, Ops
from pagoda_worker.rows.batch import Batch, batch_of_spans

Clock = Callable[[Callable[[], object]], float]
"""Calls a function a few times and returns the device's seconds per call."""

ANY_SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125)
ANY_BLOCK = 256
LENGTH = 600
# Prefill chunks and decodes, around tile boundaries and elsewhere. Each is a row of its own, with its earlier tokens.
CHUNKS = [(3, 5), (126, 129), (255, 257), (100, 330), (330, 600)]
SPANS = [*CHUNKS, *((n - 1, n) for n in (1, 64, 128, 129, 256, 257, 512, 513, *range(285, 601, 15)))]
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.005}

ROWS, PROMPT, OUTPUT = 32, 2048, 256  # the load a back end is judged by: concurrent requests, tokens in, tokens out


def problem(ops: Ops, yardstick: Ops, needs: Needs) -> str:
    """How `ops` differs from `yardstick`, or depends on the batch; empty if it does neither."""
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for shape in dict.fromkeys(needs.attention or (ANY_SHAPE,)):
            found = _problem_of(shape, ops, yardstick, needs, generator)
            if found:
                return f"{found} ({shape})"
    return ""


def _problem_of(shape: AttentionShape, ops: Ops, yardstick: Ops, needs: Needs, generator: torch.Generator) -> str:
    block_size = needs.block_size or ANY_BLOCK
    num_blocks = -(-LENGTH // block_size)
    key, value = torch.randn(2, num_blocks * block_size, shape.num_kv_heads, shape.head_dim, generator=generator)
    query = torch.randn(LENGTH, shape.num_heads, shape.head_dim, generator=generator).to(ops.device, needs.dtype)
    kv, table = _cache(ops, shape, needs, (key, value)), torch.randperm(num_blocks, generator=generator)
    wide = max(num_blocks, (shape.window or 0) // block_size + 2)  # a table may be wider than any row needs

    def attend(by: Ops, spans: Sequence[tuple[int, int]], width: int) -> Tensor:
        columns = F.pad(table, (0, wide - num_blocks))[:width].to(by.device, torch.int32)
        batch = batch_of_spans(spans, columns.repeat(len(spans), 1))
        return by.attend(query[batch.positions], kv, 0, by.plan(batch, kv), shape)

    whole = attend(ops, [(0, LENGTH)], num_blocks)
    tolerance = TOLERANCE[needs.dtype]
    if not torch.allclose(whole, attend(yardstick, [(0, LENGTH)], num_blocks), rtol=tolerance, atol=tolerance):
        return f"its results differ from those of {yardstick.name}"
    expected = torch.cat([whole[start:end] for start, end in SPANS])
    alone = torch.cat([attend(ops, [span], -(-span[1] // block_size)) for span in SPANS])
    if not (torch.equal(attend(ops, SPANS, wide), expected) and torch.equal(alone, expected)):
        return "its results depend on the batch or on how a prompt is cut"
    return ""


class Times(NamedTuple):
    """Seconds of attention over all layers: for a prompt of PROMPT tokens, and for a decode step of ROWS such rows."""

    prefill: float
    decode: float

    @property
    def of_a_request(self) -> float:
        """Seconds for its prompt plus its share of the decode steps for OUTPUT tokens."""
        return self.prefill + OUTPUT / ROWS * self.decode

    def __str__(self) -> str:
        return (
            f"{self.of_a_request * 1e3:.2f} ms for a request of {PROMPT} tokens in and {OUTPUT} out "
            f"({self.prefill * 1e3:.2f} for its prompt, {self.decode * 1e3:.3f} per step of {ROWS} such)"
        )


def measure(contestants: Sequence[Ops], needs: Needs, clock: Clock) -> list[Times]:
    """The times of each contestant; each distinct layer shape is measured once."""
    totals = [(0.0, 0.0) for _ in contestants]
    with torch.inference_mode():
        for shape, layers in Counter(needs.attention).items():
            for i, (prefill, decode) in enumerate(_measure(shape, contestants, needs, clock)):
                totals[i] = (totals[i][0] + layers * prefill, totals[i][1] + layers * decode)
    return [Times(*total) for total in totals]


def _measure(shape: AttentionShape, contestants: Sequence[Ops], needs: Needs, clock: Clock) -> list[Times]:
    device, block_size = contestants[0].device, needs.block_size or ANY_BLOCK
    blocks = -(-PROMPT // block_size)
    size = (ROWS * blocks * block_size, shape.num_kv_heads, shape.head_dim)
    kv = _cache(contestants[0], shape, needs, [torch.randn(size, dtype=needs.dtype, device=device) for _ in range(2)])
    tables = torch.randperm(ROWS * blocks, device=device).to(torch.int32).view(ROWS, blocks)
    works = (batch_of_spans([(0, PROMPT)], tables[:1]), batch_of_spans([(PROMPT - 1, PROMPT)] * ROWS, tables))

    def seconds(ops: Ops, batch: Batch) -> float:
        query = torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim, dtype=needs.dtype, device=device)
        plan = ops.plan(batch, kv)
        return clock(lambda: ops.attend(query, kv, 0, plan, shape))

    return [Times(*(seconds(ops, batch) for batch in works)) for ops in contestants]


def _cache(ops: Ops, shape: AttentionShape, needs: Needs, content: Sequence[Tensor]) -> Any:
    """A cache of one layer, filled with these keys and values; with the keys alone if it has one plane."""
    key, value = (part.to(ops.device, needs.dtype) for part in content)
    planes = planes_of(shape in needs.latent_attention, ops.keeps_latents_once)
    heads, dim = shape.num_kv_heads, shape.head_dim
    kv_shape = KVShape(num_layers=1, num_kv_heads=heads, head_dim=dim, dtype=needs.dtype, planes=planes)
    block_size = needs.block_size or ANY_BLOCK
    kv = ops.new_kv_cache(kv_shape, len(key) // block_size, block_size)
    ops.write_kv(key, value, kv, 0, torch.arange(len(key), device=ops.device))
    return kv
