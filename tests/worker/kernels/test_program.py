"""Recorded steps with fused operations: the same bits as the separate operations, with fewer barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.worker.fakes_model import new_row
from tests.worker.models.harness import make_batch

from pagoda_proto.steps import Chunk
from pagoda_worker.kernels.cpu.native import NativeOps
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import AttentionShape, Expert, HeadNorm, Ops, Rotation
from pagoda_worker.kernels.quantized import Format, Weight, quantize
from pagoda_worker.kernels.routing import Routing
from pagoda_worker.rows.batch import Batch, build_batch
from pagoda_worker.rows.layouts import Layouts
from pagoda_worker.rows.rows import Row

pytestmark = pytest.mark.usefixtures("inference")

HIDDEN, LAYERS, BLOCK = 128, 2, 32
FORMS = {
    "bf16": None,
    "int8": Format(bits=8, group=32, activation_bits=8),
    "int4a16": Format(bits=4, group=32, activation_bits=16),
}
HEADS = {"two heads in a panel": (6, 2, 16), "a head over panels": (4, 2, 80), "panels of one head": (4, 1, 128)}


class Model(NamedTuple):
    """A small decoder as in `models.decoder`, and its caches."""

    forward: Callable[[Ops, Batch, Any], tuple[torch.Tensor, ...]]
    new_kv: Callable[[], list[Any]]


def make_model(
    ops: NativeOps, heads: tuple[int, int, int], form: Format | None, quantized: bool, turned: bool = True
) -> Model:
    """`turned`: heads are normed and rotated."""
    num_heads, kv_heads, dim = heads
    shape = AttentionShape(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    kept = KVShape(num_layers=LAYERS, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16, quantized=quantized)

    def weight(n: int, k: int) -> Weight:
        values = (torch.randn(n, k) * k**-0.5).bfloat16()
        return values if form is None else quantize(values, form)

    bias = torch.randn((num_heads + 2 * kv_heads) * dim).bfloat16()
    qkv, out = ops.pack_linear(weight(len(bias), HIDDEN), bias), ops.pack_linear(weight(HIDDEN, num_heads * dim))
    up, down = ops.pack_gated(weight(2 * 192, HIDDEN)), ops.pack_linear(weight(HIDDEN, 192))
    head = ops.pack_linear(weight(96, HIDDEN))
    norms, head_norm = torch.randn(3, HIDDEN), HeadNorm(weight=torch.randn(num_heads + kv_heads, dim), eps=1e-6)
    angles, table = torch.rand(512, dim // 2) * 6, torch.randn(50, HIDDEN).bfloat16()

    def forward(ops: Ops, batch: Batch, kv: Any) -> tuple[torch.Tensor, ...]:
        stream, branch = ops.embed(batch.token_ids, table, None), None
        plan = ops.plan(batch, kv[0])
        for layer in range(LAYERS):
            x, stream = _norm_in(ops, branch, stream, norms[0])
            how = (Rotation(angles.cos(), angles.sin(), batch.positions), head_norm) if turned else (None, None)
            query = ops.rope_write(ops.linear(x, qkv), *how, kv[0], layer, batch.kv_indices)
            branch = ops.linear(ops.attend(query, kv[0], layer, plan, shape), out)
            x, stream = _norm_in(ops, branch, stream, norms[1])
            branch = ops.linear(ops.gated_linear(x, up, "silu"), down)
        x, stream = _norm_in(ops, branch, stream, norms[2])
        return x, stream, ops.logits(x, head)

    return Model(forward, lambda: [ops.new_kv_cache(kept, 20, BLOCK)])


def _norm_in(
    ops: Ops, branch: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if branch is None:
        return ops.rms_norm(stream, weight, 1e-6), stream
    return ops.add_rms_norm(branch, stream, weight, 1e-6)


# New tokens per row in each step: a long prompt, few rows, as many as every thread normalises itself, and one more.
STEPS = ({0: 260}, {0: 1, 1: 3}, {0: 1}, {0: 8}, {1: 9}, {0: 2, 1: 45, 2: 40})


def batches() -> Iterator[Batch]:
    """Batches of three rows with scattered blocks."""
    known, blocks = [0, 0, 0], [list(range(12)), [14, 13], [17, 16]]
    for step in STEPS:
        yield make_batch(
            [(torch.randint(0, 50, (new,)).tolist(), known[row], blocks[row]) for row, new in step.items()], BLOCK
        )
        for row, new in step.items():
            known[row] += new


@pytest.mark.parametrize(
    ("heads", "form", "quantized", "turned"),
    [
        ("two heads in a panel", "bf16", False, True),
        ("a head over panels", "bf16", True, True),
        ("panels of one head", "int8", True, True),
        ("a head over panels", "int4a16", False, True),
        ("two heads in a panel", "int8", False, False),
        ("a head over panels", "bf16", False, False),
        ("panels of one head", "bf16", True, False),
    ],
)
def test_what_is_done_as_one_has_the_bits_of_operations_one_by_one(
    ops: NativeOps, heads: str, form: str, quantized: bool, turned: bool
) -> None:
    model = make_model(ops, HEADS[heads], FORMS[form], quantized, turned)
    ours, theirs = model.new_kv(), model.new_kv()
    recorded = ops.record(model.forward, ours, 300)
    for batch in batches():
        for got, expected in zip(recorded(batch), model.forward(ops, batch, theirs), strict=True):
            assert torch.equal(got, expected), batch.query_lens
        got, expected = (
            ops.export_blocks(kv[0], sorted(set((batch.kv_indices // BLOCK).tolist()))) for kv in (ours, theirs)
        )
        assert torch.equal(got.cells, expected.cells)
        assert quantized == (got.scales is not None and torch.equal(got.scales, expected.scales))


def test_threads_meet_five_times_in_a_layer_of_few_rows_and_seven_in_one_of_many(ops: NativeOps) -> None:
    """Plus one barrier after the embedding and one after the logits; with many rows, also one before the logits."""
    model = make_model(ops, HEADS["panels of one head"], None, False)
    recorded = ops.record(model.forward, model.new_kv(), 300)
    for batch, count in zip(batches(), (7, 5, 5, 5, 7, 7), strict=True):
        before = ops.library.meetings
        recorded(batch)
        assert ops.library.meetings - before == 1 + LAYERS * count + (1 if count == 5 else 2), batch.query_lens


def test_what_one_thread_does_alone_in_turn_nobody_waits_for_in_between(ops: NativeOps) -> None:
    """With one row: one barrier for norm, router, routing and gathering, one per product, one for the experts' sum."""
    routing = Routing(experts=11, chosen=3, renormalised=True)
    experts = ops.pack_experts(
        (Expert(torch.randn(2 * 96, HIDDEN).bfloat16(), torch.randn(HIDDEN, 96).bfloat16()) for _ in range(11)), 11
    )
    table, norm = torch.randn(50, HIDDEN).bfloat16(), torch.randn(HIDDEN)
    router = ops.pack_linear(torch.randn(11, HIDDEN).bfloat16())

    def forward(ops: Ops, batch: Batch, kv: Any) -> tuple[torch.Tensor, ...]:
        x = ops.rms_norm(ops.embed(batch.token_ids, table, None), norm, 1e-6)
        return (ops.moe(x, ops.logits(x, router), experts, routing, "silu"),)

    kept = KVShape(num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16, quantized=False)
    kv = [ops.new_kv_cache(kept, 20, BLOCK)]
    recorded = ops.record(forward, kv, 300)
    for batch, count in zip(batches(), (9, 8, 4, 8, 9, 9), strict=True):
        before = ops.library.meetings
        (got,) = recorded(batch)
        assert ops.library.meetings - before == count, batch.query_lens
        assert torch.equal(got, forward(ops, batch, kv)[0])


def test_a_batch_that_is_renewed_has_the_results_of_a_new_one_in_every_table(ops: NativeOps) -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    kept = [KVShape(num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, table=table) for table in (0, 1)]
    lines = torch.randn(50, 8 * 16).bfloat16()

    def forward(ops: Ops, batch: Batch, kv: Any) -> tuple[torch.Tensor, ...]:
        found = []
        for group in kv:
            part = batch.at(group.shape.table)
            query = ops.rope_write(ops.embed(batch.token_ids, lines, None), None, None, group, 0, part.kv_indices)
            found.append(ops.attend(query, group, 0, ops.plan(part, group), shape))
        return tuple(found)

    caches = [[ops.new_kv_cache(one, 20, BLOCK) for one in kept] for _ in range(2)]
    recorded, layouts = ops.record(forward, caches[0], 300), Layouts(BLOCK)
    tokens = np.arange(BLOCK - 2)
    row = Row.of(new_row(1, tokens.tolist(), []), tokens, np.array([3, 5]), others=[np.array([7, 2])])
    work = [(row, Chunk(1, 0, len(tokens), True))]
    batches = []
    for token in range(6):
        batch = layouts.next(work)
        batches.append(batch)
        fresh = build_batch(work, BLOCK, torch.device("cpu"))
        for got, expected in zip(recorded(batch), forward(ops, fresh, caches[1]), strict=True):
            assert torch.equal(got, expected)
        row.append(40 + token)
        work = [(row, Chunk(1, len(row.tokens) - 1, 1, True))]
    assert len({id(batch) for batch in batches}) == 3  # a prompt, decoding in one block, decoding in two
