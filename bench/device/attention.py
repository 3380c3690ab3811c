"""Attention alone: how near decoding comes to copying, and prefill to a product of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from bench.device.ceilings import GB, TFLOP
from bench.device.hardware import seconds
from bench.device.job import Job
from bench.device.report import Line, attempt

from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.kv_cache import KVShape
from pagoda_worker.kernels.ops import AttentionShape, Needs, Ops
from pagoda_worker.rows.batch import Batch

HEADS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}  # query heads, KV heads, dimensions of a head
SMOKE_HEADS = {"8B": (4, 2, 32), "0.6B": (2, 2, 32)}
BATCHES, CONTEXTS = (1, 8, 64, 256), (512, 2048, 8192)
LEAST_BYTES = 2**30  # read in one go, layer after layer, so that little of it is still in the L2 cache
MOST_LAYERS = 64
WRITTEN_AT_ONCE = 2**16  # tokens
DECODE_BAR, BAR_AT = 0.8, (64, 2048)
PREFILL_BAR, PREFILL_BAR_AT = 400.0, 8192


class Case:
    """Rows of equal length over a cache of random numbers, in blocks of random order.

    `attend` is one layer after another; `num_layers` of them.
    """

    def __init__(self, job: Job, ops: Ops, heads: tuple[int, int, int], rows: tuple[int, int, int]) -> None:
        """`rows`: how many, new tokens of each, tokens of each."""
        (num_heads, kv_heads, dim), (count, new, context), device = heads, rows, job.hardware.device
        per_layer = 2 * 2 * count * context * kv_heads * dim
        least = 2**13 if job.smoke else LEAST_BYTES
        self.num_layers = 1 if new > 1 else max(1, min(MOST_LAYERS, -(-least // per_layer)))
        self._ops = ops
        self._shape = AttentionShape(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
        per_row = -(-context // job.block_size)
        kv_shape = KVShape(num_layers=self.num_layers, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16)
        self._kv = ops.new_kv_cache(kv_shape, count * per_row, job.block_size)
        self._fill(count * per_row * job.block_size, device)
        self._query = torch.randn(count * new, num_heads, dim, device=device).bfloat16()
        tables = torch.randperm(count * per_row, device=device).int().view(count, per_row)
        self._plan: Any = ops.plan(_batch(tables, new, context, job.block_size), self._kv)

    def _fill(self, num_tokens: int, device: torch.device) -> None:
        shape = self._kv.shape
        for first in range(0, num_tokens, WRITTEN_AT_ONCE):
            places = torch.arange(first, min(num_tokens, first + WRITTEN_AT_ONCE), device=device)
            size = (2, len(places), shape.num_kv_heads, shape.head_dim)
            key, value = torch.randn(size, device=device).bfloat16()
            for layer in range(self.num_layers):
                self._ops.write_kv(key, value, self._kv, layer, places)

    def attend(self) -> None:
        for layer in range(self.num_layers):
            self._ops.attend(self._query, self._kv, layer, self._plan, self._shape)


def _batch(tables: torch.Tensor, new: int, context: int, block_size: int) -> Batch:
    count, device = len(tables), tables.device
    positions = torch.arange(context - new, context, device=device).repeat(count)
    blocks = tables[:, (positions[:new] // block_size)].flatten().long()
    lens = [new] * count
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        kv_indices=blocks * block_size + positions % block_size,
        block_tables=tables,
        query_starts=[0, *accumulate(lens)],
        query_lens=lens,
        context_lens=[context] * count,
        logit_indices=positions[:0],
        device_lengths=torch.full((count,), context, dtype=torch.int32, device=device),
    )


def _ops(job: Job) -> Ops:
    dim = (SMOKE_HEADS if job.smoke else HEADS)["8B"][2]
    return load_ops(job.hardware.device, job.kernels, Needs(dtype=torch.bfloat16, head_dims=(dim,)))[0]


def _recorded(job: Job, run: Callable[[], None]) -> tuple[Callable[[], object], str]:
    """`run` in one call, as a decode step has it, so that the host's part does not count; and what to say about it."""
    run()
    try:
        return job.hardware.accelerator().capture(run), "recorded"
    except RuntimeError as error:
        return run, f"not recorded ({str(error).splitlines()[0]})"


def _decode(job: Job, ops: Ops, name: str, batch: int, context: int) -> Iterator[Line]:
    heads = (SMOKE_HEADS if job.smoke else HEADS)[name]
    case = Case(job, ops, heads, (batch, 1, context))
    replay, how = _recorded(job, case.attend)
    took = seconds(job.hardware, replay) / case.num_layers
    read = 2 * 2 * batch * context * heads[1] * heads[2]
    ceiling = job.copy / GB or None
    bar = job.bar(DECODE_BAR * job.copy / GB or None, holds=(batch, context) == BAR_AT)
    yield Line(
        what=_decode_name(name, batch, context),
        value=read / took / GB,
        unit="GB/s",
        ceiling=ceiling,
        bar=bar,
        note=f"{took * 1e6:.1f} us, {ops.name}, blocks of {job.block_size}, {case.num_layers} layers {how}",
    )


def _decode_name(name: str, batch: int, context: int) -> str:
    return f"decode attention {name}, {batch} x {context}"


@torch.inference_mode()
def decode(job: Job) -> None:
    ops = _ops(job)
    cases = [(batch, context) for context in CONTEXTS for batch in BATCHES]
    if job.smoke:
        cases = [(1, 64), (2, 100)]
    cases.sort(key=lambda case: case != BAR_AT)  # the one that has a bar first
    for name in HEADS:
        for batch, context in cases:
            attempt(_decode_name(name, batch, context), _decode, job, ops, name, batch, context)
            job.hardware.empty_cache()


def _prefill(job: Job, ops: Ops, name: str, count: int, length: int) -> Iterator[Line]:
    heads = (SMOKE_HEADS if job.smoke else HEADS)[name]
    num_heads, _, dim = heads
    case = Case(job, ops, heads, (count, length, length))
    took = seconds(job.hardware, case.attend)
    flops = count * 4 * num_heads * dim * length * (length + 1) / 2  # of the half that a causal mask leaves
    yield Line(
        what=_prefill_name(name, count, length),
        value=flops / took / TFLOP,
        unit="TFLOP/s",
        ceiling=job.flops / TFLOP or None,
        bar=job.bar(PREFILL_BAR, holds=length == PREFILL_BAR_AT),
        note=f"{took * 1e3:.2f} ms, {ops.name}, blocks of {job.block_size}",
    )


def _prefill_name(name: str, count: int, length: int) -> str:
    return f"prefill attention {name}, {count} x {length}"


@torch.inference_mode()
def prefill(job: Job) -> None:
    ops = _ops(job)
    cases = [(1, 48)] if job.smoke else [(1, 8192), (1, 2048), (4, 2048)]
    for name in HEADS:
        for count, length in cases:
            attempt(_prefill_name(name, count, length), _prefill, job, ops, name, count, length)
            job.hardware.empty_cache()
